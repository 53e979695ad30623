//! The hardware of a run, by the column `device_type`.

use fsdp_plan::cluster::Cluster;

use crate::row::Row;
use crate::words::{matches, pattern_of};

/// Patterns of device names in lower case, and their clusters; the last item is the cluster of the PCIe card, if there
/// is one.
const DEVICES: [(&str, &str, Option<&str>); 10] = [
    (r"^a100.*\b40 ?g", "a100-40-sxm", Some("a100-40-pcie")),
    (r"^a[18]00", "a100-80-sxm", Some("a100-80-pcie")),
    (r"^h100", "h100-sxm", Some("h100-pcie")),
    (r"^h200", "h200-sxm", None),
    (r"^b200", "b200-sxm", None),
    (r"^mi300x", "mi300x", None),
    (r"^tpu-?v4", "tpu-v4", None),
    (r"^tpu-?v5(e|lite)", "tpu-v5e", None),
    (r"^tpu-?v5p", "tpu-v5p", None),
    (r"^v5litepod", "tpu-v5e", None),
];

/// Bandwidth of A800's NVLink in bytes per second, one way: 400 GB/s both ways instead of A100's 600 (Reuters, 8
/// November 2022, as reported by <https://tweakers.net/nieuws/203182>).
const A800_LINK: f64 = 200e9;

/// The hardware of a run; `None` if it is not known.
pub(crate) fn cluster(row: &Row) -> Option<Cluster> {
    let device = row.word("device_type").replace(['_', ' '], "-");
    let device = device.trim_start_matches("nvidia-").trim_start_matches("amd-");
    // The pattern must not end within a number: an H1000 is not an H100.
    let (_, name, card) =
        DEVICES.iter().find(|(pattern, ..)| matches(&format!(r"{pattern}(?:\D|$)"), device))?;
    let card = card.filter(|_| matches("pci", device));
    let mut cluster = Cluster::known(card.unwrap_or(name)).expect("it is one of ours");
    if device.starts_with("a800") && card.is_none() {
        cluster.node.link.bandwidth.value = A800_LINK;
    }
    if device.contains("hbm2e-500w") {
        // A card with less power and older memory: 12 % less in products, according to the source.
        cluster.device.peak.values_mut().for_each(|peak| peak.value *= 0.88);
        cluster.device.memory_bandwidth.value = 2.4e12;
        cluster.device.memory.value = 96.0 * f64::from(1 << 30);
    }
    // GCP's A3: 8 NICs of 200 Gb/s, of which TCPX gets half.
    let is_a3 = row.word("source").contains("gpu/a3");
    let named = if is_a3 { Some(100e9) } else { network(row.text("device_type")) };
    if let (Some(bandwidth), Some(network)) = (named, &mut cluster.network) {
        network.bandwidth.value = bandwidth;
    }
    Some(cluster)
}

/// Bandwidth of a node's network in bytes per second, if the text states it: `400Gbps`, `3.2 Tbps`, `8x200Gb`,
/// `50GB/s`. Numbers that are not rates, such as the bytes of a device, are ignored.
fn network(text: &str) -> Option<f64> {
    let rate = r"(?:(\d+) ?[xX] ?)?(\d+(?:\.\d+)?) ?([gGtT])(?:(B(?:ps|/s))|(b(?:ps|/s|it/s|it|E|\b)))";
    pattern_of(rate).captures_iter(text).find_map(|found| {
        let number = |group: usize| found.get(group).and_then(|text| text.as_str().parse::<f64>().ok());
        let (count, bytes, bits) = (number(1), found.get(4), found.get(5));
        let is_rate = bytes.is_some() || count.is_some() || bits.is_some_and(|bits| bits.as_str() != "b");
        let scale = if found[3].eq_ignore_ascii_case("t") { 1e12 } else { 1e9 };
        let each = number(2)? * scale / if bytes.is_some() { 1.0 } else { 8.0 };
        is_rate.then(|| count.unwrap_or(1.0) * each)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::read;

    fn of(device: &str) -> Option<Cluster> {
        let text = format!(
            "layers,hidden,heads,ffn,vocab,seq,micro_batch,devices,device_type,sharding,act_ckpt\n\
             2,32,4,64,100,32,1,8,{device},fsdp,none\n"
        );
        cluster(&read(&text, "runs.csv").unwrap().rows[0])
    }

    #[test]
    fn network_bandwidth_parses_in_any_unit() {
        let rates = [
            ("A100-80GB-400Gbps", 50e9),
            ("H100-80GB-800Gbps", 100e9),
            ("H100-2400Gbps", 300e9),
            ("H100-80GB-3.2Tbps", 400e9),
            ("H100 1.6 Tbps", 200e9),
            ("H100-2Tbps", 250e9),
            ("A100-40GB-4x100Gb", 50e9),
            ("A100 8x200Gb", 200e9),
            ("H100-8x400GbE", 400e9),
            ("A100-200Gbps", 25e9),
            ("A100-80GB-50GB/s", 50e9),
            ("A100-100Gbit", 12.5e9),
        ];
        for (text, expected) in rates {
            assert_eq!(network(text), Some(expected), "{text}");
            assert_eq!(of(text).unwrap().network.unwrap().bandwidth.value, expected, "{text}");
        }
        for text in ["H100-80GB", "8x80GB", "A100-80GB-SXM-400W", "H100-96GB-HBM2e-500W", "TPU-v4(chips)"] {
            assert_eq!(network(text), None, "{text}");
        }
    }

    #[test]
    fn pcie_cards_are_distinguished_from_sxm_modules() {
        let name = |device: &str| of(device).map(|cluster| cluster.name);
        let names = [
            ("A100-80GB-PCIe", Some("a100-80-pcie")),
            ("A100-PCIE-40GB", Some("a100-40-pcie")),
            ("NVIDIA A100-SXM4-40GB", Some("a100-40-sxm")),
            ("a100_80gb", Some("a100-80-sxm")),
            ("H100-PCIe", Some("h100-pcie")),
            ("H100-80GB-HBM3", Some("h100-sxm")),
            ("TPU v5e", Some("tpu-v5e")),
            ("MI300X", Some("mi300x")),
            ("GB200", None),
            ("H100SXM5", Some("h100-sxm")),
            ("H1000-80GB", None),
            ("RTX A1000", None),
            ("A1000", None),
            ("V100-32GB", None),
        ];
        for (device, expected) in names {
            assert_eq!(name(device).as_deref(), expected, "{device}");
        }
        let link = |device: &str| of(device).unwrap().node.link.bandwidth.value;
        assert_eq!(link("A800-SXM4-80GB") * 1.5, link("A100-SXM4-80GB"));
        assert_eq!(link("A800-80GB-PCIe"), link("A100-80GB-PCIe"));
    }
}
