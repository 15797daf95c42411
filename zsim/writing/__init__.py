"""What leaves zsim: reports, pictures, traces, files written as a whole or not at all."""
