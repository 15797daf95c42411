"""The reference engine: trains for real, under the experiment file that the simulator reads."""
