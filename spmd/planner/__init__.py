"""What a step will need and how long it will take, known before it runs: memory, traffic and time,
for hardware that need not be there.
"""
