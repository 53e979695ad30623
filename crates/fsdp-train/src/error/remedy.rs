//! Adds advice in terms of run-file keys to errors of lower layers, which do not know about run files.

use std::io;

use fsdp_core::memory::Category;
use fsdp_core::{Error, MemoryKind, OutOfMemory};

/// The error message, with advice.
pub(super) fn with_remedy(error: &Error) -> String {
    match error {
        Error::Policy { .. } => format!("fsdp.{error}"),
        other => format!("{other}{}", remedy(other)),
    }
}

/// Like [`with_remedy`], for an error that may not be of the core.
pub(super) fn any_with_remedy(error: &(dyn std::error::Error + Send + Sync + 'static)) -> String {
    error.downcast_ref().map_or_else(|| error.to_string(), with_remedy)
}

/// Advice for an output folder that cannot be written.
pub(super) fn of_output(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => "check its permissions",
        _ => "make room there",
    }
}

fn remedy(error: &Error) -> &'static str {
    match error {
        Error::Mesh { .. } => " (fsdp.mesh)",
        Error::WrapClass { .. } => "; name some of these in fsdp.wrap",
        Error::TiedAcrossUnits { .. } => {
            ": change fsdp.wrap or fsdp.min_num_params so that neither has a unit of its own"
        }
        Error::OutOfMemory(error) => memory_remedy(error),
        Error::Device(source) if source.to_string().contains("deterministic implementation") => {
            "; run.deterministic = false allows it"
        }
        _ => "",
    }
}

/// Advice for freeing memory.
fn memory_remedy(error: &OutOfMemory) -> &'static str {
    match (error.kind, error.category) {
        (MemoryKind::Host, _) => {
            ". Lower data.seq_len or train.micro_batch_size, recompute (fsdp.activation_checkpointing), or train on a \
             machine with more memory"
        }
        (MemoryKind::Pinned, _) => {
            ". fsdp.offload = \"none\" needs hardly any, and SGD without momentum has no state to keep there"
        }
        (MemoryKind::Device, Category::Activation | Category::Workspace) => {
            ". Lower train.micro_batch_size, use fsdp.activation_checkpointing or fsdp.offload = \"cpu\", or share \
             samples among ranks (fsdp.mesh.context)"
        }
        (MemoryKind::Device, Category::Unsharded | Category::GradientSlot) => {
            ". Use smaller units (fsdp.wrap), less prefetching, a smaller train.micro_batch_size or \
             fsdp.offload = \"cpu\""
        }
        (MemoryKind::Device, _) => {
            ". Use more ranks, fsdp.offload = \"cpu\", a smaller train.micro_batch_size or \
             fsdp.activation_checkpointing"
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn out_of_memory(kind: MemoryKind, category: Category) -> String {
        let error = OutOfMemory { kind, category, bytes: Some(3 << 20), in_use: "nothing".to_owned() };
        with_remedy(&error.into())
    }

    #[test]
    fn out_of_memory_error_names_keys_that_free_memory() {
        assert_eq!(
            out_of_memory(MemoryKind::Device, Category::Activation),
            "no room for 3.0 MiB of device memory for activations: nothing. Lower train.micro_batch_size, use \
             fsdp.activation_checkpointing or fsdp.offload = \"cpu\", or share samples among ranks (fsdp.mesh.context)"
        );
        for (kind, category, key) in [
            (MemoryKind::Device, Category::Unsharded, "fsdp.wrap"),
            (MemoryKind::Device, Category::OptimizerState, "fsdp.offload = \"cpu\""),
            (MemoryKind::Pinned, Category::OptimizerState, "fsdp.offload = \"none\""),
            (MemoryKind::Host, Category::OptimizerState, "data.seq_len"),
        ] {
            assert!(out_of_memory(kind, category).contains(key), "{}", out_of_memory(kind, category));
        }
    }

    #[test]
    fn unwritable_output_names_permissions_or_room() {
        let text = |kind: io::ErrorKind| {
            let path = "out".into();
            crate::TrainError::Io { action: "create", path, source: kind.into() }.to_string()
        };
        for kind in [io::ErrorKind::PermissionDenied, io::ErrorKind::ReadOnlyFilesystem] {
            assert!(
                text(kind).ends_with("; check its permissions, or choose another run.out_dir"),
                "{}",
                text(kind)
            );
        }
        let full = text(io::ErrorKind::StorageFull);
        assert!(full.ends_with("; make room there, or choose another run.out_dir"), "{full}");
    }

    #[test]
    fn policy_error_uses_run_file_key() {
        let error =
            Error::Policy { key: "reduce_dtype", value: "u32".into(), expected: "must be a float".into() };
        assert_eq!(with_remedy(&error), "fsdp.reduce_dtype = u32: must be a float");
        let boxed: Box<dyn std::error::Error + Send + Sync> = Box::new(error);
        assert_eq!(any_with_remedy(&*boxed), "fsdp.reduce_dtype = u32: must be a float");
    }

    #[test]
    fn nondeterministic_op_error_names_key_that_allows_it() {
        let text = with_remedy(&Error::Device("x does not have a deterministic implementation".into()));
        assert!(text.ends_with("; run.deterministic = false allows it"), "{text}");
    }
}
