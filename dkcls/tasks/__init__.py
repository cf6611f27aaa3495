"""Tasks: one folder for each, which registers its class in `dkcls.engine.task.TASKS`."""
