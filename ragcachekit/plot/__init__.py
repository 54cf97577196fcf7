"""Pictures of reports and calibrations; matplotlib is imported at the first one."""
