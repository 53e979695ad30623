use std::fs;

use fsdp_plan::measured::Point;

use super::*;

fn points(what: &str, of: &[(usize, f64)]) -> Points {
    let point = |&(ranks, seconds): &(usize, f64)| Point { ranks, size: vec![8.0], work: 8.0, seconds };
    [(what.to_owned(), of.iter().map(point).collect())].into()
}

fn measured(machine: &str) -> Measured {
    Measured {
        machine: machine.to_owned(),
        device: "cpu".into(),
        version: env!("CARGO_PKG_VERSION").into(),
        date: "2026-11-23T00:00:00Z".into(),
        threads: 2,
        issue: 0.0,
        between_calls: 0.0,
        calls: points("linear f32", &[(1, 1.0)]),
        operations: Points::new(),
        collectives: points("all-gather threads", &[(1, 1.0), (2, 2.0)]),
        steps: Points::new(),
    }
}

#[test]
fn add_replaces_points_with_same_rank_count() {
    let mut all = points("x", &[(1, 1.0), (2, 2.0)]);
    add(&mut all, points("x", &[(2, 3.0), (4, 4.0)]));
    add(&mut all, points("y", &[(1, 5.0)]));
    let seconds = |what: &str| all[what].iter().map(|point| (point.ranks, point.seconds)).collect::<Vec<_>>();
    assert_eq!(seconds("x"), [(1, 1.0), (2, 3.0), (4, 4.0)]);
    assert_eq!(seconds("y"), [(1, 5.0)]);
}

#[test]
fn points_of_other_machine_device_or_version_are_rejected() {
    let like = || machine::like(None, Device::Cpu).unwrap();
    let file = Path::new("mine.toml");
    let here = machine::name(Device::Cpu, None, 2);
    assert!(expect_compatible(machine::cluster(like(), measured(&here), 2, None), Device::Cpu, file).is_ok());
    let rejection = |measured: Measured, device: Device| {
        expect_compatible(machine::cluster(like(), measured, 2, None), device, file).unwrap_err().to_string()
    };
    let error = rejection(measured("an abacus"), Device::Cpu);
    assert!(error.contains("mine.toml is from another machine: \"an abacus\""), "{error}");
    let error = rejection(measured(&here), Device::TorchCpu);
    assert!(error.contains("another device: \"cpu\", but this one is \"torch-cpu\""), "{error}");
    let error = rejection(Measured { version: "0.0.1".into(), ..measured(&here) }, Device::Cpu);
    assert!(error.contains("another version: \"0.0.1\""), "{error}");
    let error = expect_compatible(like(), Device::Cpu, file).unwrap_err().to_string();
    assert!(error.contains("no measured points"), "{error}");
}

#[test]
fn calibration_round_trips_and_replaces_only_same_machine() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("mine.toml");
    let cluster =
        machine::cluster(machine::like(None, Device::Cpu).unwrap(), measured("a \"machine\""), 4, None);
    write(&cluster, &file).unwrap();
    assert_eq!(read_cluster(&file).unwrap(), cluster);
    expect_replaceable(&file, "a \"machine\", 64 threads").unwrap();
    let error = expect_replaceable(&file, "an abacus, 10 threads").unwrap_err().to_string();
    assert!(error.contains("is a calibration of another machine: a \"machine\""), "{error}");
    fs::write(&file, "mine").unwrap();
    let error = expect_replaceable(&file, "an abacus, 10 threads").unwrap_err().to_string();
    assert!(error.contains("is not a calibration"), "{error}");
}

#[test]
fn like_is_required_for_cuda_and_must_match_device() {
    let error = machine::like(None, Device::Cuda).unwrap_err().to_string();
    assert!(error.contains("--like: name a cluster"), "{error}");
    let error = machine::like(Some("h100-sxm"), Device::Cpu).unwrap_err().to_string();
    assert!(error.contains("h100-sxm has other devices than \"cpu\""), "{error}");
}
