"""The paper's experiments (section 5 and S.3): run, timed, drawn, and checked sentence by sentence."""
