"""Built-in data sets, one module each, which register themselves in `DATASETS`."""
