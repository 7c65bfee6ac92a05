"""Parts of LAPS-SD that the plug-in uses."""
