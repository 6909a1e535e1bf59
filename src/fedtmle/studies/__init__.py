"""Running studies: in one process, over a federation, and what an owner looks at before."""
