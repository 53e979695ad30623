//! What data sheets say of cards.

/// Dense products of bf16 matrices with sums in f32, in TFLOP/s. A name is looked for in its order: parts of names come
/// after names that contain them.
const PEAKS: [(&str, f64); 10] = [
    ("B200", 2250.0),
    ("GH200", 989.4),
    ("H200", 989.4),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.5),
    ("H100", 989.4),
    ("A100", 311.9),
    ("L40S", 362.1),
    ("L40", 181.0),
    ("L4", 121.0),
];

/// The peak of a card by the name that the driver gives it, if it is known.
pub(super) fn peak_tflops(name: &str) -> Option<f64> {
    PEAKS.iter().find(|(part, _)| name.contains(part)).map(|&(_, peak)| peak)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_driver_are_known_and_others_are_not() {
        let known = [
            ("NVIDIA H200", 989.4),
            ("NVIDIA H100 PCIe", 756.0),
            ("NVIDIA H100 80GB HBM3", 989.4),
            ("NVIDIA A100-SXM4-80GB", 311.9),
            ("NVIDIA L40S", 362.1),
            ("NVIDIA L4", 121.0),
        ];
        for (name, peak) in known {
            assert_eq!(peak_tflops(name), Some(peak), "{name}");
        }
        assert_eq!(peak_tflops("Tesla T4"), None);
    }
}
