"""The paper's theorems as functions: what was proved, evaluated for a run or a plan."""
