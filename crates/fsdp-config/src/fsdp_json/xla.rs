//! The keys of FSDP on XLA.

use serde_json::{Map, Value};

use super::{File, WRAP};
use crate::error::ConfigError;
use crate::reader::unknown_key;

/// XLA settings that have a counterpart here.
const XLA_SETTINGS: [&str; 4] =
    ["reshard_after_forward", "disable_reshard_on_root", "compute_dtype", "fp32_reduce_scatter"];
/// Settings that only steer XLA.
const XLA_SETTINGS_WITHOUT_MEANING: &[&str] = &[
    "flatten_parameters",
    "execute_sharding_on_init",
    "optimization_barrier_in_forward",
    "optimization_barrier_in_backward",
    "sync_on_finalization",
    "buffer_dtype",
    "sharding_groups",
    "sharding_rank",
    "sharding_world_size",
    "shard_param_on_dim_0",
    "pin_layout_in_collective_ops",
    "reduce_scatter_bucket_size_mb",
    "coalesce_all_gather_ops",
    "auto_wrap_policy",
    "auto_wrapper_callable",
    "param_init_fn",
];

impl File<'_> {
    pub(super) fn xla(&mut self) -> Result<(), ConfigError> {
        let is_xla = self.take_bool("xla")?.unwrap_or(false);
        let grad_ckpt = self.take_bool("xla_fsdp_grad_ckpt")?.unwrap_or(false);
        let object = |value: &Value| value.as_object().cloned();
        let settings = self.take("xla_fsdp_settings", "an object", object)?.unwrap_or_default();
        if !is_xla {
            if grad_ckpt {
                self.warn_needs("xla_fsdp_grad_ckpt", "`xla`: true");
            }
            if !settings.is_empty() {
                self.warn_needs("xla_fsdp_settings", "`xla`: true");
            }
            return Ok(());
        }
        if grad_ckpt {
            self.set("activation_checkpointing", "full");
            if !WRAP.iter().any(|&key| self.result.keys.contains_key(key)) {
                self.warn_needs("xla_fsdp_grad_ckpt", "a wrap policy: the root is not checkpointed");
            }
        }
        self.xla_settings(settings)
    }

    fn xla_settings(&mut self, settings: Map<String, Value>) -> Result<(), ConfigError> {
        let known = [&XLA_SETTINGS, XLA_SETTINGS_WITHOUT_MEANING].concat();
        if let Some(key) = settings.keys().find(|key| !known.contains(&key.as_str())) {
            let dotted = |key: &str| format!("xla_fsdp_settings.{key}");
            return Err(unknown_key(self.origin.to_owned(), key, &known, dotted));
        }
        for (key, value) in settings {
            if XLA_SETTINGS.contains(&key.as_str()) {
                self.keys.insert(format!("xla_fsdp_settings.{key}"), value);
            } else {
                self.warn_meaningless(format!("xla_fsdp_settings.{key}"));
            }
        }
        self.xla_reshard()?;
        self.xla_dtypes()
    }

    fn xla_reshard(&mut self) -> Result<(), ConfigError> {
        let reshard = self.take_bool("xla_fsdp_settings.reshard_after_forward")?;
        let keep_root = self.take_bool("xla_fsdp_settings.disable_reshard_on_root")?;
        if reshard.is_some() || keep_root.is_some() {
            match (reshard.unwrap_or(true), keep_root.unwrap_or(true)) {
                (false, _) => self.set("reshard_after_forward", false),
                (true, true) => self.set("reshard_after_forward", "auto"),
                (true, false) => self.set("reshard_after_forward", true),
            }
        }
        Ok(())
    }

    fn xla_dtypes(&mut self) -> Result<(), ConfigError> {
        let allowed = "\"float32\" or \"bfloat16\" (XLA has no float64, and reduces float16 in float16)";
        let compute = self.take("xla_fsdp_settings.compute_dtype", allowed, compute_dtype)?;
        let in_f32 = self.take_bool("xla_fsdp_settings.fp32_reduce_scatter")?.unwrap_or(false);
        if let Some(dtype) = compute {
            self.set("param_dtype", dtype);
        }
        // As in XLA, gradients are reduced in the compute dtype unless requested otherwise.
        if let Some(dtype) = if in_f32 { Some("f32") } else { compute } {
            self.set("reduce_dtype", dtype);
        }
        Ok(())
    }
}

fn compute_dtype(value: &Value) -> Option<&'static str> {
    match value.as_str()? {
        "float32" | "float" => Some("f32"),
        "bfloat16" => Some("bf16"),
        _ => None,
    }
}
