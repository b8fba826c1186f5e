"""What a run tells people: log lines, metrics of steps, and the page that shows them. Off unless asked for.

The room imports torch alone. Others log through `log`, and give the metrics what a step has computed.
"""
