"Everything that takes time: shapes are in `cases`, clocks in `timing`."
