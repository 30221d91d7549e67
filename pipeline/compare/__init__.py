"""Calibration experiments: which calibrator to trust, also when the data shifts; and has production data drifted?"""
