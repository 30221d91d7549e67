"""What people look at: heatmaps, tables, one self-contained HTML page."""
