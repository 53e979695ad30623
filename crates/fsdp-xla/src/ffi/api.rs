//! The API's function table, and calls through it.

use std::ffi::c_void;
use std::path::{Path, PathBuf};

use libloading::{Library, Symbol};

use super::description::DeviceKind;
use super::options::Settings;
use super::{elf, key_value};
use crate::error::{EXHAUSTED, OLDEST, XlaError};
use crate::store::{DEADLINE_EXCEEDED, Store, UNAVAILABLE};

/// Eight bytes of a struct: an integer, or a pointer.
pub(super) type Word = usize;

/// A function of the API: its index in the table, its name, and the size of its struct up to the last field used here.
#[derive(Clone, Copy)]
pub(super) struct Function {
    index: usize,
    name: &'static str,
    bytes: usize,
}

macro_rules! functions {
    ($($constant:ident = $index:literal, $name:literal, $bytes:literal;)*) => {
        $(pub(super) const $constant: Function = Function { index: $index, name: $name, bytes: $bytes };)*
    };
}

functions! {
    ERROR_DESTROY = 0, "PJRT_Error_Destroy", 24;
    ERROR_MESSAGE = 1, "PJRT_Error_Message", 40;
    ERROR_CODE = 2, "PJRT_Error_GetCode", 32;
    INITIALIZE = 3, "PJRT_Plugin_Initialize", 16;
    PLUGIN_ATTRIBUTES = 4, "PJRT_Plugin_Attributes", 32;
    EVENT_DESTROY = 5, "PJRT_Event_Destroy", 24;
    EVENT_AWAIT = 8, "PJRT_Event_Await", 24;
    CLIENT_CREATE = 10, "PJRT_Client_Create", 88;
    CLIENT_DESTROY = 11, "PJRT_Client_Destroy", 24;
    PLATFORM_NAME = 12, "PJRT_Client_PlatformName", 40;
    PLATFORM_VERSION = 14, "PJRT_Client_PlatformVersion", 40;
    ADDRESSABLE_DEVICES = 16, "PJRT_Client_AddressableDevices", 40;
    COMPILE = 20, "PJRT_Client_Compile", 56;
    UPLOAD = 22, "PJRT_Client_BufferFromHostBuffer", 120;
    DESCRIPTION_ID = 23, "PJRT_DeviceDescription_Id", 32;
    DESCRIPTION_ATTRIBUTES = 25, "PJRT_DeviceDescription_Attributes", 40;
    DESCRIPTION_KIND = 26, "PJRT_DeviceDescription_Kind", 40;
    GET_DESCRIPTION = 29, "PJRT_Device_GetDescription", 32;
    EXECUTABLE_DESTROY = 40, "PJRT_Executable_Destroy", 24;
    NUM_OUTPUTS = 44, "PJRT_Executable_NumOutputs", 32;
    COST_ANALYSIS = 46, "PJRT_Executable_GetCostAnalysis", 40;
    OPTIMIZED_PROGRAM = 48, "PJRT_Executable_OptimizedProgram", 32;
    SERIALIZE = 49, "PJRT_Executable_Serialize", 56;
    LOADED_DESTROY = 50, "PJRT_LoadedExecutable_Destroy", 24;
    GET_EXECUTABLE = 51, "PJRT_LoadedExecutable_GetExecutable", 32;
    LOADED_DEVICES = 52, "PJRT_LoadedExecutable_AddressableDevices", 40;
    EXECUTE = 55, "PJRT_LoadedExecutable_Execute", 80;
    LOAD = 56, "PJRT_Executable_DeserializeAndLoad", 64;
    BUFFER_DESTROY = 58, "PJRT_Buffer_Destroy", 24;
    DOWNLOAD = 70, "PJRT_Buffer_ToHostBuffer", 56;
    TOPOLOGY_CREATE = 82, "PJRT_TopologyDescription_Create", 56;
    TOPOLOGY_DESTROY = 83, "PJRT_TopologyDescription_Destroy", 24;
    TOPOLOGY_DEVICES = 86, "PJRT_TopologyDescription_GetDeviceDescriptions", 40;
    COMPILE_AHEAD = 89, "PJRT_Compile", 64;
    CLIENT_TOPOLOGY = 95, "PJRT_Client_TopologyDescription", 32;
    MEMORY_STATS = 96, "PJRT_Executable_GetCompiledMemoryStats", 144;
}

/// Words of a struct; no struct has more.
const WORDS: usize = 24;

/// The struct of a call. The first word is its size; the second is an extension pointer, which is unused.
#[derive(Clone, Copy)]
pub(super) struct Arguments([Word; WORDS]);

impl Arguments {
    pub(super) fn new() -> Self {
        Self([0; WORDS])
    }

    pub(super) fn set(mut self, field: usize, value: Word) -> Self {
        self.0[field] = value;
        self
    }

    pub(super) fn pointer<T>(self, field: usize, value: *const T) -> Self {
        self.set(field, value as Word)
    }

    pub(super) fn get(&self, field: usize) -> Word {
        self.0[field]
    }
}

/// An opened plugin. It stays open until the process exits: plugins do not survive being closed.
pub(crate) struct Plugin {
    path: PathBuf,
    api: *const Word,
}

// SAFETY: the table is never written after `GetPjrtApi` has returned it, and the functions of the API may be called from any
// thread.
unsafe impl Send for Plugin {}
// SAFETY: as above.
unsafe impl Sync for Plugin {}

impl Plugin {
    /// Opens a plugin's shared library and initializes it.
    ///
    /// # Errors
    /// Those of [`Plugin::load`]; [`XlaError::Lacks`], or an error of the plugin.
    pub(crate) fn open(path: &Path) -> Result<Self, XlaError> {
        let plugin = Self::load(path)?;
        plugin.call(INITIALIZE, Arguments::new())?;
        Ok(plugin)
    }

    /// Opens a plugin's shared library without initializing it; calls only `GetPjrtApi`.
    ///
    /// # Errors
    /// [`XlaError::Unusable`] if it is no plugin for this machine; [`XlaError::Version`].
    pub(crate) fn load(path: &Path) -> Result<Self, XlaError> {
        let open_error = |reason: libloading::Error| {
            // Only the error's source has the loader's message.
            let message = std::error::Error::source(&reason).map(ToString::to_string);
            XlaError::open(path, message.unwrap_or_else(|| reason.to_string()))
        };
        // SAFETY: the initializers of a plugin chosen by the user run here, as in any program that loads it.
        let library =
            unsafe { Library::new(path) }.map_err(|reason| match elf::foreign_architecture(path) {
                Some(architecture) => XlaError::Unusable(format!(
                    "the PJRT plugin {} is for {architecture}, but this machine is {}: install the package for this one",
                    path.display(),
                    std::env::consts::ARCH
                )),
                None => open_error(reason),
            })?;
        let library = std::mem::ManuallyDrop::new(library);
        let no_api = || {
            let what = "is not a PJRT plugin: it has no function GetPjrtApi, or that returns nothing";
            XlaError::Unusable(format!("{} {what}", path.display()))
        };
        // SAFETY: the header declares `const PJRT_Api* GetPjrtApi()`.
        let get: Symbol<'_, unsafe extern "C" fn() -> *const Word> =
            unsafe { library.get(b"GetPjrtApi") }.map_err(|_| no_api())?;
        // SAFETY: the function takes no arguments, and the table lives as long as the library, which is never closed.
        let api = unsafe { get() };
        if api.is_null() {
            return Err(no_api());
        }
        let plugin = Self { path: path.into(), api };
        match plugin.version() {
            version if version < OLDEST || version.0 > OLDEST.0 => {
                Err(XlaError::Version { path: path.into(), version })
            }
            _ => Ok(plugin),
        }
    }

    /// The path of the library.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Major and minor version of the API.
    pub(crate) fn version(&self) -> (i32, i32) {
        // SAFETY: the table begins with its size, an extension, and a struct of a size, an extension and two `int`s.
        let word = unsafe { *self.api.add(4) };
        (word as i32, (word >> 32) as i32)
    }

    /// The function's address; `None` if the table ends before it, or its entry is null.
    fn function(&self, function: Function) -> Option<unsafe extern "C" fn(*mut Word) -> *mut c_void> {
        // SAFETY: the first word is the size of the table in bytes; five words precede the functions.
        let functions = unsafe { *self.api }.saturating_sub(40) / 8;
        if function.index >= functions {
            return None;
        }
        // SAFETY: the index is within the table, and every entry is a pointer, or null, to a function of this type.
        unsafe { std::mem::transmute::<Word, Option<_>>(*self.api.add(5 + function.index)) }
    }

    /// Calls a function; returns its struct with the outputs.
    ///
    /// # Errors
    /// [`XlaError::Lacks`], [`XlaError::Call`].
    pub(super) fn call(&self, function: Function, mut arguments: Arguments) -> Result<Arguments, XlaError> {
        let Some(entry) = self.function(function) else {
            let (path, version) = (self.path.clone(), self.version());
            return Err(XlaError::Lacks { path, version, function: function.name });
        };
        arguments.0[0] = function.bytes;
        // SAFETY: the caller has filled the fields that the header requires, and the struct is longer than its size
        // says.
        let error = unsafe { entry(arguments.0.as_mut_ptr()) };
        if error.is_null() { Ok(arguments) } else { Err(self.error(function.name, error)) }
    }

    /// The newest StableHLO version that the plugin supports; `None` if it does not report one.
    pub(crate) fn stablehlo(&self) -> Option<[u64; 3]> {
        let found = self.call(PLUGIN_ATTRIBUTES, Arguments::new()).ok()?;
        // SAFETY: the list has this many attributes, which live as long as the process.
        let attributes = unsafe { attributes(found.get(2), found.get(3)) };
        let (_, list) = attributes.into_iter().find(|(name, _)| name == "stablehlo_current_version")?;
        // SAFETY: the value of this name is a list of three integers, which lives as long as the process.
        (list != 0).then(|| unsafe { *(list as *const [u64; 3]) })
    }

    /// Classifies a compile failure, for a device kind and flags, as one of memory, of the program, or of other
    /// processes, which a plugin may contact.
    pub(super) fn classify_compile_error(
        &self,
        kind: &DeviceKind,
        flags: &[&'static str],
        error: XlaError,
    ) -> XlaError {
        match error {
            XlaError::Call { code: EXHAUSTED, message, .. } => {
                XlaError::Memory { device: kind.name.clone(), bytes: kind.memory, message }
            }
            error @ XlaError::Call { code: DEADLINE_EXCEEDED | UNAVAILABLE, .. } => error,
            XlaError::Call { message, .. } => {
                let (path, stablehlo, flags) = (self.path.clone(), self.stablehlo(), flags.to_vec());
                XlaError::Compile { path, stablehlo, flags, message }
            }
            other => other,
        }
    }

    /// Reads an error and destroys it.
    fn error(&self, function: &'static str, error: *mut c_void) -> XlaError {
        let query = |operation: Function| {
            let mut arguments = Arguments::new().pointer(2, error);
            arguments.0[0] = operation.bytes;
            if let Some(code) = self.function(operation) {
                // SAFETY: the error belongs to this plugin and is not destroyed yet; these functions take it in field
                // 2.
                unsafe { code(arguments.0.as_mut_ptr()) };
            }
            arguments
        };
        let (message, code) = (query(ERROR_MESSAGE), query(ERROR_CODE));
        // SAFETY: the message lives until the error is destroyed.
        let text = unsafe { text(message.get(3), message.get(4)) };
        query(ERROR_DESTROY);
        XlaError::Call { function, code: code.get(3) as i32, message: text }
    }

    /// Waits for an event and destroys it; a null event has already happened.
    ///
    /// # Errors
    /// The error of the event.
    pub(super) fn wait(&self, event: Word) -> Result<(), XlaError> {
        if event == 0 {
            return Ok(());
        }
        let result = self.call(EVENT_AWAIT, Arguments::new().set(2, event)).map(drop);
        self.call(EVENT_DESTROY, Arguments::new().set(2, event))?;
        result
    }

    /// Creates a client with these options. With several processes, `store` connects them and must outlive the client.
    pub(super) fn create_client(&self, settings: &Settings, store: Option<&Store>) -> Result<Word, XlaError> {
        let arguments = Arguments::new().pointer(2, settings.words()).set(3, settings.count());
        let arguments = store.map_or(arguments, |store| key_value::with_store(arguments, store));
        Ok(self.call(CLIENT_CREATE, arguments)?.get(8))
    }

    /// Whether its devices are GPUs, detected by the extension for custom calls of GPU kernels.
    pub(crate) fn is_for_gpus(&self) -> bool {
        /// `PJRT_Extension_Type_Gpu_Custom_Call`.
        const GPU_CUSTOM_CALL: u32 = 0;
        // SAFETY: the second word is null or points to the first extension: a size, a four-byte type, and a pointer to
        // the next one. Extensions are never written.
        unsafe {
            let mut extension = *self.api.add(1) as *const Word;
            while !extension.is_null() {
                if *extension.add(1).cast::<u32>() == GPU_CUSTOM_CALL {
                    return true;
                }
                extension = *extension.add(2) as *const Word;
            }
        }
        false
    }
}

/// Reads a list of `PJRT_NamedValue`: the name of each, and the bits of its number or the address of its text or list.
///
/// # Safety
/// `list` must point to `count` of them, and their texts must be valid.
pub(super) unsafe fn attributes(list: Word, count: usize) -> Vec<(String, u64)> {
    /// Words of a value: size, extension, name, name length, kind, the value itself, and its length.
    const WORDS: usize = 7;
    let read = |index: usize| {
        // SAFETY: as the caller promises.
        let value = unsafe { std::slice::from_raw_parts((list as *const Word).add(WORDS * index), WORDS) };
        // SAFETY: as the caller promises.
        (unsafe { text(value[2], value[3]) }, value[5] as u64)
    };
    (0..count).map(read).collect()
}

/// # Safety
/// `pointer` must be null or point to `len` bytes.
pub(super) unsafe fn text(pointer: Word, len: Word) -> String {
    if pointer == 0 {
        return String::new();
    }
    // SAFETY: as the caller promises.
    let bytes = unsafe { std::slice::from_raw_parts(pointer as *const u8, len) };
    String::from_utf8_lossy(bytes).into_owned()
}
