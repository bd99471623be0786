"""Local steps: ranks train apart, and exchange their progress every H steps."""
