"""The study of published runs: reads tables of other people's runs, predicts them with the planner, scores and fits the predictions."""
