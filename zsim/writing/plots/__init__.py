"""Pictures, one a file: `figure(finding)` draws, `style.save` writes. The only home of matplotlib.

Each is a pure function of the numbers that it shows, drawn without matplotlib's global state.
"""
