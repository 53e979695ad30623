//! Stand-in until the generators are merged.
/// Key.
pub fn key(parts: &[u64]) -> u64 { parts.iter().fold(1, |a, b| a * 31 + b) }
/// Part.
pub fn name_part(name: &str) -> u64 { name.len() as u64 }
/// Normal.
pub fn normal(key: u64, counter: u64) -> f64 { (key + counter) as f64 }
