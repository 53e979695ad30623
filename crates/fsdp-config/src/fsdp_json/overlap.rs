//! How far ahead units are gathered: it changes speed and memory, and no result.

use serde_json::Value;

use super::File;
use crate::error::ConfigError;

const FORWARD: &str = "forward_prefetch";
const BACKWARD: &str = "backward_prefetch";

/// What PyTorch gathers while backward computes a unit: the next one, or nothing.
const BACKWARD_VALUES: [(&str, i64); 3] = [("BACKWARD_PRE", 1), ("BACKWARD_POST", 0), ("NO_PREFETCH", 0)];

impl File<'_> {
    pub(super) fn overlap(&mut self) -> Result<(), ConfigError> {
        match self.take_bool(FORWARD)? {
            Some(true) => self.set(FORWARD, 1),
            // PyTorch's processes issue the gather of the next unit early even then.
            Some(false) => self.warn_no_effect(
                FORWARD,
                "one unit is gathered ahead, as PyTorch does without it; `fsdp.forward_prefetch` = 0 gathers none",
            ),
            None => {}
        }
        // The second version of FSDP has no such setting.
        let is_second = self.keys.get("version").is_some_and(|version| *version == 2 || *version == "2");
        let allowed = BACKWARD_VALUES.map(|(name, _)| name).join(", ") + " (or 1, 2)";
        match self.take(BACKWARD, &allowed, backward)? {
            Some(_) if is_second => {
                self.warn_no_effect(
                    BACKWARD,
                    "FSDP2 gathers one unit ahead in any case, as is the default here",
                );
            }
            Some(units) => self.set(BACKWARD, units),
            None => {}
        }
        Ok(())
    }
}

/// Reads a name in any case, or the number that accelerate gives it.
fn backward(value: &Value) -> Option<i64> {
    let text = value.as_str().map_or_else(|| value.to_string(), |text| text.trim().to_ascii_uppercase());
    let number =
        text.parse::<usize>().ok().and_then(|number| number.checked_sub(1)).filter(|&index| index < 2);
    let named = BACKWARD_VALUES.iter().position(|(name, _)| *name == text);
    number.or(named).map(|index| BACKWARD_VALUES[index].1)
}
