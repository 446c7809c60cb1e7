//! Shipped kernels: which module of a family is loaded on a device, and the table of functions.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, PoisonError};

use ninfer_core::capability::{PtxIsa, Selection, Target};
use ninfer_core::{Error, Result};

use super::driver::{Context, Function, Module};
use super::images::IMAGES;

/// Compressed PTX of one family for one target.
#[derive(Clone, Copy, Debug)]
pub struct Image {
    /// Family of kernels, the name of its source file.
    pub family: &'static str,
    /// What it was built for.
    pub target: Target,
    /// Its `.version`.
    pub isa: PtxIsa,
    /// zlib stream of the text.
    pub bytes: &'static [u8],
    /// Kernels in it.
    pub entries: &'static [&'static str],
}

impl Image {
    /// The PTX text.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if it does not decompress.
    pub fn text(&self) -> Result<String> {
        let corrupt = |reason: String| Error::Corrupt { reason: format!("PTX of {}: {reason}", self.family) };
        let bytes = miniz_oxide::inflate::decompress_to_vec_zlib(self.bytes).map_err(|e| corrupt(e.to_string()))?;
        String::from_utf8(bytes).map_err(|e| corrupt(e.to_string()))
    }
}

/// All shipped images.
#[must_use]
pub fn images() -> &'static [Image] {
    IMAGES
}

/// A kernel that was used on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KernelUse {
    /// Its name.
    pub name: &'static str,
    /// The target of the module that it was taken from.
    pub target: Target,
    /// Newer or more specific targets that were left out, with the reason.
    pub passed_over: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of a thread's stack.
    pub local_bytes: u32,
    /// Static shared memory of a block in bytes.
    pub shared_bytes: u32,
}

/// What the text of a module says of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Facts {
    /// It holds a wait for the kernel before. All that do wait before they read anything that a kernel wrote
    /// (kernels/ptx/bulk.cuh), so they may be started while that one still runs.
    waits: bool,
    /// Bytes of its parameter, a struct.
    parameter: usize,
}

/// The kernels of a module; those without a struct as their only parameter are left out.
fn facts(ptx: &str) -> HashMap<String, Facts> {
    let entries = ptx.split(".entry ").skip(1).filter_map(|entry| {
        let (name, rest) = entry.split_once('(')?;
        let (parameters, _) = rest.split_once(')')?;
        let (_, size) = parameters.rsplit_once('[')?;
        let parameter = size.split_once(']')?.0.parse().ok()?;
        let one = parameters.matches(".param").count() == 1;
        one.then(|| (name.trim().to_owned(), Facts { waits: entry.contains("griddepcontrol.wait"), parameter }))
    });
    entries.collect()
}

/// A module with what its text says of its kernels.
struct LoadedModule {
    module: Module,
    facts: HashMap<String, Facts>,
}

#[derive(Default)]
struct Loaded {
    /// By family and target.
    modules: HashMap<(&'static str, Target), LoadedModule>,
    functions: HashMap<&'static str, (Function, Target, u32)>,
}

/// Modules and functions of one device; loaded when first asked for.
pub(super) struct Kernels {
    context: Arc<Context>,
    selection: Selection,
    loaded: Mutex<Loaded>,
}

impl Kernels {
    pub(super) fn new(context: &Arc<Context>, selection: Selection) -> Self {
        Self { context: context.clone(), selection, loaded: Mutex::default() }
    }

    pub(super) fn selection(&self) -> &Selection {
        &self.selection
    }

    /// The best version of a kernel for the device, allowed to use `shared` bytes of dynamic shared memory.
    pub(super) fn get(&self, family: &'static str, name: &'static str, shared: u32) -> Result<Function> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        let (function, target, allowed) = match loaded.functions.get(name) {
            Some((function, _, allowed)) if shared <= *allowed => return Ok(*function),
            Some(known) => *known,
            None => {
                let image = self.image(family, name)?;
                let key = (family, image.target);
                let loaded_module = match loaded.modules.entry(key) {
                    Entry::Occupied(known) => known.into_mut(),
                    Entry::Vacant(place) => {
                        let label = format!("{family}.{}", image.target);
                        let text = image.text()?;
                        let module = Module::load(&self.context, &label, &text)?;
                        place.insert(LoadedModule { module, facts: facts(&text) })
                    }
                };
                let mut function = loaded_module.module.function(name)?;
                if let Some(facts) = loaded_module.facts.get(name) {
                    (function.overlaps, function.parameter) = (facts.waits, facts.parameter);
                }
                // Without being asked for more, a block has 48 KiB, of which its static variables take some.
                (function, image.target, (48 << 10) - function.shared)
            }
        };
        if shared > allowed {
            function.allow_shared(shared)?;
        }
        loaded.functions.insert(name, (function, target, allowed.max(shared)));
        Ok(function)
    }

    fn image(&self, family: &'static str, name: &'static str) -> Result<&'static Image> {
        let of_family = || IMAGES.iter().filter(|i| i.family == family && i.entries.contains(&name));
        self.selection.targets.iter().find_map(|t| of_family().find(|i| i.target == *t)).ok_or_else(|| {
            Error::Unsupported {
                op: format!("kernel {name}"),
                need: of_family().map(|i| i.target.to_string()).collect::<Vec<_>>().join(" or "),
                have: self.selection.base.to_string(),
            }
        })
    }

    /// Every kernel used so far, by name.
    pub(super) fn report(&self) -> Vec<KernelUse> {
        let loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        let mut uses: Vec<_> = loaded
            .functions
            .iter()
            .map(|(&name, (function, target, _))| KernelUse {
                name,
                target: *target,
                passed_over: self.passed_over(name, *target),
                registers: function.registers,
                local_bytes: function.local,
                shared_bytes: function.shared,
            })
            .collect();
        uses.sort_by_key(|u| u.name);
        uses
    }

    fn passed_over(&self, name: &str, chosen: Target) -> String {
        let mut text = String::new();
        for image in IMAGES.iter().filter(|i| i.entries.contains(&name) && i.target > chosen) {
            let reason =
                if self.selection.targets.contains(&image.target) { "not preferred" } else { "not on this device" };
            let _ = write!(text, "{}{}: {reason}", if text.is_empty() { "" } else { ", " }, image.target);
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::cuda::{
        attention, bandwidth, choose, gdn, gdn_chunk, linear, mma_tile, moe, norm, pack, sample, step, tile, tile_e4m3,
    };

    #[test]
    fn facts_are_read_from_the_text() {
        let ptx = ".visible .entry first(\n.param .align 8 .b8 first_param_0[48]\n)\n{\nret;\n}\n\
                   .visible .entry second(\n.param .align 8 .b8 second_param_0[8]\n)\n{\ngriddepcontrol.wait;\nret;\n}\n\
                   .visible .entry third(\n.param .b64 third_param_0,\n.param .align 8 .b8 third_param_1[8]\n)\n{\nret;\n}\n";
        let expected = [
            ("first".to_owned(), Facts { waits: false, parameter: 48 }),
            ("second".to_owned(), Facts { waits: true, parameter: 8 }),
        ];
        assert_eq!(facts(ptx), HashMap::from(expected));
    }

    /// The struct that is passed has the size of the one that each kernel of each module declares.
    #[test]
    fn parameters_are_as_large_as_the_kernels_declare() {
        let tables = [
            attention::PARAMETERS,
            bandwidth::PARAMETERS,
            choose::PARAMETERS,
            gdn::PARAMETERS,
            gdn_chunk::PARAMETERS,
            linear::PARAMETERS,
            mma_tile::PARAMETERS,
            moe::PARAMETERS,
            norm::PARAMETERS,
            pack::PARAMETERS,
            sample::PARAMETERS,
            step::PARAMETERS,
            tile::PARAMETERS,
            tile_e4m3::PARAMETERS,
        ];
        for image in images() {
            let facts = facts(&image.text().unwrap());
            for &entry in image.entries {
                let rows = tables.iter().flat_map(|t| t.iter()).filter(|(name, _)| entry.starts_with(name));
                let sizes: Vec<usize> = rows.map(|(_, size)| *size).collect();
                assert_eq!(sizes, [facts[entry].parameter], "{entry} of {}.{}", image.family, image.target);
            }
        }
    }
}
