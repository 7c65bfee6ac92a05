"""`laps-sd loadtest`: what is sent when, how it is sent, and what the answers amount to. Nothing here serves."""
