use super::*;

#[test]
fn known_clusters_parse_and_cite_sources() {
    for name in names() {
        let cluster = Cluster::known(name).unwrap();
        assert_eq!(cluster.name, name);
        for (key, number) in cluster.numbers() {
            assert!(!number.source.trim().is_empty(), "{name}: {key}");
        }
        cluster.peak(DType::F32).unwrap();
        let narrow = cluster.peak(DType::Bf16).unwrap();
        if cluster.kind != Kind::Tpu {
            assert_eq!(cluster.peak(DType::F16).unwrap(), narrow, "{name}");
        }
    }
}

#[test]
fn unknown_cluster_suggests_nearest_name() {
    let error = Cluster::known("h100sxm").unwrap_err().to_string();
    assert!(error.contains("did you mean `h100-sxm`?"), "{error}");
    assert!(error.contains("tpu-v5p"), "{error}");
}

#[test]
fn aliases_resolve_to_full_cluster_names() {
    for (alias, full) in ALIASES {
        assert_eq!(Cluster::known(alias).unwrap(), Cluster::known(full).unwrap());
        assert!(!names().contains(&alias), "{alias}");
    }
    assert_eq!(Cluster::known("H100-SXM").unwrap().name, "h100-sxm");
}

#[test]
fn invalid_values_are_rejected_with_their_key() {
    let (_, text) = KNOWN.into_iter().find(|(name, _)| *name == "h100-sxm").unwrap();
    let changed = |from: &str, to: &str| {
        assert!(text.contains(from), "{from}");
        Cluster::parse(&text.replacen(from, to, 1), "my.toml").unwrap_err().to_string()
    };
    let error = changed("devices = { value = 8,", "devices = { value = 7.5,");
    assert!(error.contains("my.toml: `node.devices` is 7.5, but must be a whole number"), "{error}");
    let error = changed(
        "[node.link]\nkind = \"nvlink\"\nbandwidth = { value = ",
        "[node.link]\nkind = \"nvlink\"\nbandwidth = { value = -",
    );
    assert!(
        error.contains("`node.link.bandwidth` is -450000000000, but must be bytes, or bytes a second"),
        "{error}"
    );
    let error = changed("generation = \"hopper\"", "generation = \"volta\"");
    assert!(
        error.contains("`generation` is \"volta\"") && error.contains("ampere, hopper, blackwell, cdna3"),
        "{error}"
    );
    let error = changed("bf16 = { value = 9.894e14", "bf16 = { value = 989");
    assert!(error.contains("`device.peak.bf16` is 989, but must be operations a second"), "{error}");
    let error = changed("latency = { value = 1.9e-6", "latency = { value = 1.9");
    assert!(error.contains("`node.link.latency` is 1.9, but must be seconds, at most 0.1"), "{error}");
    let error = changed("memory_bandwidth", "memory_bandwith");
    assert!(error.contains("memory_bandwith"), "{error}");
    let error = changed("kind = \"nvlink\"", "kind = \"rope\"");
    assert!(error.contains("unknown variant `rope`"), "{error}");
}

#[test]
fn missing_peak_error_names_dtype() {
    let error = Cluster::known("tpu-v4").unwrap().peak(DType::F64).unwrap_err().to_string();
    assert!(error.contains("`device.peak.f64`, only bf16, f32"), "{error}");
}
