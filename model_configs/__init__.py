"""The model descriptions that come with tpkit, one YAML file per family. Installed as ``tpkit.model_configs``."""
