"""Which elements of a tensor lie where: partitions, equal runs, flat parameters, plans of dims."""
