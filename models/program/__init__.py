"""Reading a program: its conjugate pieces, its structure, and itself with the match summed out."""
