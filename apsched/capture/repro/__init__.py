"""Files that torch wrote when it traced a job, as captured graphs."""
