//! Device properties that a plugin reports.

use super::api::{self, Arguments, Plugin, Word, attributes, text};
use crate::error::XlaError;

/// The device attribute with the bytes of memory available to programs.
const MEMORY: &str = "device_memory_bytes_limit";

/// A kind of device.
#[derive(Clone, Debug, Default)]
pub(crate) struct DeviceKind {
    /// Its name, as the plugin reports it.
    pub(crate) name: String,
    /// Bytes of memory available to programs; `None` if the plugin does not report it.
    pub(crate) memory: Option<u64>,
}

impl DeviceKind {
    /// Whether it is XLA's own device for processors.
    pub(crate) fn is_cpu(&self) -> bool {
        self.name == "cpu"
    }

    /// Whether it may run operations beside a loop. Others run the operations of a program one by one, or in streams.
    pub(crate) fn runs_in_parallel(&self) -> bool {
        self.is_cpu()
    }

    /// Reads the kind from a `PJRT_DeviceDescription` of this plugin, which must still be alive.
    ///
    /// # Errors
    /// Any error of the plugin.
    pub(super) fn of(plugin: &Plugin, description: Word) -> Result<Self, XlaError> {
        let kind = plugin.call(api::DESCRIPTION_KIND, Arguments::new().set(2, description))?;
        // SAFETY: the text lives as long as the description.
        let name = unsafe { text(kind.get(3), kind.get(4)) };
        let found = match plugin.call(api::DESCRIPTION_ATTRIBUTES, Arguments::new().set(2, description)) {
            Err(error) if error.is_unimplemented() => return Ok(Self { name, memory: None }),
            found => found?,
        };
        // SAFETY: the list has this many attributes, which live as long as the description.
        let attributes = unsafe { attributes(found.get(4), found.get(3)) };
        let memory = attributes.into_iter().find(|(name, _)| name == MEMORY).map(|(_, bytes)| bytes);
        Ok(Self { name, memory })
    }
}
