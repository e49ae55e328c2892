"""The cases of the survey, by source."""
