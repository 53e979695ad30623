//! GPU peaks from data sheets.

/// Dense bf16 products with f32 accumulation, in TFLOP/s. Entries are matched in order: a name that is part of another
/// comes after it.
const PEAKS: [(&str, f64); 11] = [
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("H200 NVL", 835.5),
    ("H200", 989.4),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.5),
    ("H100", 989.4),
    ("A100", 311.9),
    ("L40S", 362.1),
    ("L40", 181.0),
    ("L4", 121.0),
];

/// The peak of a GPU by its driver name; `None` if unknown, or for a MIG instance.
pub(crate) fn peak_tflops(name: &str) -> Option<f64> {
    if name.contains("MIG") {
        return None;
    }
    PEAKS.iter().find(|(part, _)| name.contains(part)).map(|&(_, peak)| peak)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peak_tflops_is_found_for_known_cards_only() {
        let known = [
            ("NVIDIA GB200", 2500.0),
            ("NVIDIA H200", 989.4),
            ("NVIDIA GH200 480GB", 989.4),
            ("NVIDIA H200 NVL", 835.5),
            ("NVIDIA H100 PCIe", 756.0),
            ("NVIDIA H100 80GB HBM3", 989.4),
            ("NVIDIA A100-SXM4-80GB", 311.9),
            ("NVIDIA L40S", 362.1),
            ("NVIDIA L4", 121.0),
        ];
        for (name, peak) in known {
            assert_eq!(peak_tflops(name), Some(peak), "{name}");
        }
        for name in ["Tesla T4", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"] {
            assert_eq!(peak_tflops(name), None, "{name}");
        }
    }
}
