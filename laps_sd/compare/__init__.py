"""`laps-sd compare`: the live stack under one policy after the other, with the same requests at the same times."""
