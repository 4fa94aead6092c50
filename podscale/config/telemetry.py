"""Telemetry section: metrics, the step log, and experiment trackers."""

from typing import Literal

from pydantic import model_validator

from podscale.config.fields import Section, conflict_error, display_field

TrackerName = Literal["tensorboard", "wandb", "mlflow"]


class WandbSection(Section):
    """Project of the run in Weights & Biases; other settings are its WANDB_* variables."""

    project: str | None = display_field(
        None, "Project of Weights & Biases; default: WANDB_PROJECT, else `podscale`.", min_length=1, max_length=128
    )
    entity: str | None = display_field(
        None, "User or team that the project belongs to; default: WANDB_ENTITY, else the key's own.", min_length=1
    )


class MlflowSection(Section):
    """Server and experiment of the run in MLflow; other settings are its MLFLOW_* variables."""

    tracking_uri: str | None = display_field(
        None,
        "Tracking server of MLflow, https://... or sqlite:///...; default: MLFLOW_TRACKING_URI. Put credentials into "
        "MLflow's variables.",
        min_length=1,
    )
    experiment: str | None = display_field(
        None, "Experiment of MLflow; default: MLFLOW_EXPERIMENT_NAME, else `podscale`.", min_length=1
    )


class TelemetrySection(Section):
    enabled: bool = display_field(True, "Serve Prometheus metrics while a stage runs.")
    address: str = display_field("127.0.0.1", "Address that the metrics endpoint listens on (0.0.0.0 in pods).")
    port: int = display_field(0, "Port of the metrics endpoint; 0 = any free one (printed).", ge=0, le=65535)
    linger_seconds: float = display_field(
        0.0, "Keep serving metrics after the end until the next scrape, at most this many seconds.", ge=0
    )
    required: bool = display_field(
        False,
        "Fail if metrics cannot be served, and stop if a tracker fails. Otherwise the run logs a warning and "
        "continues.",
    )
    tls_certificate: str | None = display_field(None, "PEM file of the HTTPS endpoint's certificate.")
    tls_key: str | None = display_field(None, "PEM file of the certificate's key, without a password.")
    tls_client_ca: str | None = display_field(
        None, "PEM file of the authority that signs the client certificates of scrapers (mTLS)."
    )
    bearer_token_file: str | None = display_field(None, "File with the bearer token that scrapers must send.")
    pushgateway: str | None = display_field(
        None,
        "URL of a Pushgateway to which sharding and evaluation push their last metrics, deleted from it after "
        "linger_seconds.",
        pattern="^https?://[^/]",
    )
    log: Literal["auto", "text", "json"] = display_field(
        "auto", "Format of the log. `auto`: text on a terminal, JSON lines elsewhere."
    )
    log_every: int = display_field(10, "Steps between two lines of the step log.", ge=1)
    mlperf_log: bool = display_field(
        False, "Also write mlperf.log in the run directory, for MLPerf's tools. Needs train.target_top1."
    )
    mlperf_division: Literal["closed", "open"] = display_field("open", "Division named in mlperf.log.")
    mlperf_org: str = display_field("none", "Organisation named in mlperf.log.", min_length=1)
    trackers: tuple[TrackerName, ...] = display_field(
        (),
        "Experiment trackers to which training logs its metrics: `tensorboard` (event files in the run directory), "
        "`wandb`, `mlflow`.",
    )
    wandb: WandbSection = WandbSection()
    mlflow: MlflowSection = MlflowSection()

    @model_validator(mode="after")
    def _check_endpoint_options(self) -> "TelemetrySection":
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise conflict_error(
                "tls_key" if self.tls_key is None else "tls_certificate",
                "tls_certificate and tls_key belong together",
                hint="Give both, or neither.",
            )
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise conflict_error(
                "tls_client_ca", "client certificates need TLS", hint="Give tls_certificate and tls_key too."
            )
        if self.pushgateway is not None and not self.linger_seconds:
            raise conflict_error(
                "pushgateway",
                "needs linger_seconds",
                hint="Set it to two scrape intervals of the gateway or more.",
            )
        if len(set(self.trackers)) < len(self.trackers):
            raise conflict_error("trackers", "a tracker is named twice", got=list(self.trackers))
        return self
