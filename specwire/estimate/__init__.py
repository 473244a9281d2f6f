"""What things cost and how proposals fare, from what was observed; and the clocks that observe it."""
