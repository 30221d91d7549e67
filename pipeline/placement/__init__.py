"""Where Q/DQ pairs go: rules, the plan they make, and its insertion into the graph."""
