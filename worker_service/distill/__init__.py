"""`laps-sd distill`: a draft head for any target, learned from the target's own output. It serves nobody."""
