//! Checks whether tasks of `srun` can start MPI: only if Slurm runs the service from which an MPI library gets its
//! place (`srun --mpi=pmi2` or `pmix`). Without it, a library treats each task as a world of its own, or ends it.

use fsdp_comm::process::place::ProcessPlace;
use fsdp_mpi::Family;

/// A service that libraries query, and the variables that Slurm sets for it.
struct Service {
    name: &'static str,
    rank: &'static str,
    /// The variable with the number of tasks; empty if there is none.
    size: &'static str,
    /// One of these variables has its address.
    address_variables: &'static [&'static str],
}

const PMI2: Service =
    Service { name: "pmi2", rank: "PMI_RANK", size: "PMI_SIZE", address_variables: &["PMI_FD", "PMI_PORT"] };

const PMIX: Service = Service {
    name: "pmix",
    rank: "PMIX_RANK",
    size: "PMIX_SIZE",
    address_variables: &["PMIX_NAMESPACE", "PMIX_SERVER_URI2"],
};

/// Checks that Slurm runs the service that this library family uses, and that the service and Slurm agree on this
/// process's place: the variables may come from another, outer launcher.
///
/// # Errors
/// What prevents the use of MPI.
pub(super) fn expect_mpi(
    place: &ProcessPlace,
    family: Family,
    variable: &dyn Fn(&str) -> Option<String>,
) -> Result<(), String> {
    let services: &[Service] = match family {
        Family::OpenMpi => &[PMIX],
        Family::Mpich => &[PMI2],
        Family::Standard => &[PMI2, PMIX],
    };
    let is_running = |service: &&Service| {
        variable(service.rank).is_some()
            && service.address_variables.iter().any(|name| variable(name).is_some())
    };
    let Some(service) = services.iter().find(is_running) else {
        let names: Vec<&str> = services.iter().map(|service| service.name).collect();
        return Err(format!("srun has not started MPI for this library (srun --mpi={})", names.join(" or ")));
    };
    let differs = |name: &'static str, number: usize| {
        let value = variable(name)?;
        (value.trim().parse() != Ok(number)).then(|| {
            format!("{name} is {value}, but this is task {} of {} of srun", place.process, place.processes)
        })
    };
    let mismatch = differs(service.rank, place.process).or_else(|| differs(service.size, place.processes));
    mismatch.map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use fsdp_comm::process::place::LaunchedBy;

    use super::*;

    const PLACE: ProcessPlace = ProcessPlace {
        launched_by: LaunchedBy::Srun,
        process: 5,
        processes: 8,
        local_process: 1,
        local_processes: 4,
    };

    fn check(family: Family, variables: &[(&str, &str)]) -> Result<(), String> {
        expect_mpi(&PLACE, family, &|name| {
            let found = variables.iter().find(|(variable, _)| *variable == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn mpi_family_requires_its_pmi_service() {
        let pmi2 = [("PMI_RANK", "5"), ("PMI_SIZE", "8"), ("PMI_FD", "21")];
        let pmix = [("PMIX_RANK", "5"), ("PMIX_NAMESPACE", "slurm.pmix.7.0")];
        assert_eq!(check(Family::Mpich, &pmi2), Ok(()));
        assert_eq!(check(Family::OpenMpi, &pmix), Ok(()));
        assert_eq!(check(Family::Standard, &pmi2), Ok(()));
        assert_eq!(check(Family::Standard, &pmix), Ok(()));
        for (family, variables, remedy) in [
            (Family::Mpich, &pmix[..], "(srun --mpi=pmi2)"),
            (Family::OpenMpi, &pmi2, "(srun --mpi=pmix)"),
            (Family::Standard, &[], "(srun --mpi=pmi2 or pmix)"),
            (Family::Mpich, &pmi2[..2], "(srun --mpi=pmi2)"),
        ] {
            let error = check(family, variables).unwrap_err();
            assert!(error.ends_with(remedy), "{error}");
        }
    }

    #[test]
    fn pmi_variables_of_other_launcher_are_rejected() {
        let outer = [("PMI_RANK", "0"), ("PMI_SIZE", "2"), ("PMI_FD", "21")];
        let error = check(Family::Mpich, &outer).unwrap_err();
        assert_eq!(error, "PMI_RANK is 0, but this is task 5 of 8 of srun");
        let error =
            check(Family::Mpich, &[("PMI_RANK", "5"), ("PMI_SIZE", "9"), ("PMI_FD", "3")]).unwrap_err();
        assert_eq!(error, "PMI_SIZE is 9, but this is task 5 of 8 of srun");
    }
}
