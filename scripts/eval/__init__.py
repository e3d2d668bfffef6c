"Everything that measures quality: models and windows of text are in `windows`."
