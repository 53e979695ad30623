//! Messages as JSON lines, in the form of events of `tracing`.

use serde_json::{Value, json};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

use super::process_name::process_name;

/// The current time as in events: `2026-11-23T12:00:00.000000Z`.
pub(crate) fn now() -> String {
    let mut timestamp = String::new();
    // Writing to a string cannot fail.
    let _ = SystemTime.format_time(&mut Writer::new(&mut timestamp));
    timestamp
}

/// Formats a message that is not a `tracing` event as the JSON line of one.
pub(super) fn line(level: &str, message: &str, caused_by: &[String]) -> String {
    let mut fields = json!({ "message": message });
    if !caused_by.is_empty() {
        fields["caused_by"] = json!(caused_by);
    }
    let line = json!({ "timestamp": now(), "level": level, "fields": fields, "target": "fsdp" });
    with_process_name(&line.to_string())
}

/// Adds the name of this process to the text of a JSON object, if it is not the first of several processes.
pub(crate) fn with_process_name(object: &str) -> String {
    match (process_name(), object.strip_prefix('{')) {
        (Some(name), Some(fields)) => format!("{{\"process\":{},{fields}", Value::from(name)),
        _ => object.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_line_has_event_format() {
        let line: Value = serde_json::from_str(&line("WARN", "a \"name\"\nb", &[])).unwrap();
        let keys: Vec<&String> = line.as_object().unwrap().keys().collect();
        assert_eq!(keys, ["timestamp", "level", "fields", "target"]);
        assert_eq!(line["fields"], json!({ "message": "a \"name\"\nb" }));
        assert!(line["timestamp"].as_str().unwrap().ends_with('Z'), "{line}");
    }
}
