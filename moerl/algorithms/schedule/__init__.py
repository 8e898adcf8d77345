"""Update schedules, one file each: in which optimizer update of its minibatch a token trains."""
