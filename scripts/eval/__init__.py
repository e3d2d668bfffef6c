"What measures something other than time."
