"""Published runs: reads tables of other people's runs, predicts them with the planner, and scores the predictions."""
