use super::*;

fn names(set: &[(&str, &str)]) -> Vec<String> {
    let variable =
        |name: &str| set.iter().find(|(variable, _)| *variable == name).map(|(_, value)| value.into());
    let candidates = candidates(&variable, None);
    candidates.iter().map(|path| path.display().to_string()).collect()
}

#[test]
fn library_family_of_launcher_is_tried_first() {
    let open_mpi = ["libmpi.so.40", "libmpi.so.12", "libmpich.so.12", "libmpi_abi.so.1"];
    let mpich = ["libmpi.so.12", "libmpich.so.12", "libmpi_abi.so.1", "libmpi.so.40"];
    assert_eq!(names(&[]), open_mpi);
    assert_eq!(names(&[("OMPI_COMM_WORLD_SIZE", "4"), ("PMIX_RANK", "0")]), open_mpi);
    assert_eq!(names(&[("PMI_RANK", "0")]), mpich);
    // Slurm can set both variables; Open MPI understands PMIx.
    assert_eq!(names(&[("PMI_RANK", "0"), ("PMIX_RANK", "0")]), open_mpi);
}

#[test]
fn named_library_is_only_candidate() {
    assert_eq!(
        names(&[("FSDP_MPI_LIBRARY", "/opt/mpi/libmpi.so"), ("PMI_RANK", "0")]),
        ["/opt/mpi/libmpi.so"]
    );
    assert_eq!(names(&[("FSDP_MPI_LIBRARY", "")]), names(&[]));
}

#[test]
fn libraries_next_to_launcher_precede_system_ones() {
    let folder = env::temp_dir().join(format!("fsdp-mpi-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("libmpi.so.12"), "").unwrap();
    let candidates = candidates(&|_| None, Some(folder.clone()));
    fs::remove_dir_all(&folder).unwrap();
    assert_eq!(candidates[..2], [folder.join("libmpi.so.12"), "libmpi.so.40".into()]);
    assert_eq!(candidates.len(), 5, "what is not there is not tried");
}
