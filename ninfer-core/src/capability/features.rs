//! Features of a device, derived from its compute capability.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{Capability, CudaVersion, Target};
use crate::{Error, Result};

/// Something a kernel route may need.
///
/// The capability ranges were checked by assembling probes with `ptxas` for every target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Feature {
    /// Asynchronous 16-byte copies from global to shared memory, `cp.async` (8.0 and newer).
    CpAsync,
    /// Matrix fragments loaded from shared memory, `ldmatrix` (8.0 and newer; also before).
    Ldmatrix,
    /// `mma.sync` on bf16 (8.0 and newer).
    MmaBf16,
    /// `mma.sync` on signed bytes (8.0 and newer).
    MmaInt8,
    /// `mma.sync` on E4M3 is accepted (8.9 and newer).
    MmaFp8,
    /// `mma.sync` on E4M3 is executed as such (8.9, 12.x). On 9.0 the assembler turns it into f16 products: no gain.
    MmaFp8Native,
    /// Bulk copies with memory barriers, `cp.async.bulk` (9.0 and newer).
    BulkCopy,
    /// Programmatic dependent launch, `griddepcontrol` (9.0 and newer).
    DependentLaunch,
    /// Thread-block clusters (9.0 and newer).
    Clusters,
    /// Warpgroup products, `wgmma` (9.0 only, by the `sm_90a` target).
    Wgmma,
    /// Block-scaled FP4 and FP8 `mma.sync` (12.0 and 12.1, by the `sm_120f` target).
    MmaFp4,
    /// Grids whose blocks are all resident at once (all supported parts).
    CooperativeLaunch,
}

impl Feature {
    /// All features.
    pub const ALL: [Self; 12] = [
        Self::CpAsync,
        Self::Ldmatrix,
        Self::MmaBf16,
        Self::MmaInt8,
        Self::MmaFp8,
        Self::MmaFp8Native,
        Self::BulkCopy,
        Self::DependentLaunch,
        Self::Clusters,
        Self::Wgmma,
        Self::MmaFp4,
        Self::CooperativeLaunch,
    ];

    /// Short lower-case name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::CpAsync => "cp.async",
            Self::Ldmatrix => "ldmatrix",
            Self::MmaBf16 => "bf16 mma",
            Self::MmaInt8 => "int8 mma",
            Self::MmaFp8 => "fp8 mma",
            Self::MmaFp8Native => "native fp8 mma",
            Self::BulkCopy => "bulk copy",
            Self::DependentLaunch => "dependent launch",
            Self::Clusters => "clusters",
            Self::Wgmma => "wgmma",
            Self::MmaFp4 => "block-scaled fp4 mma",
            Self::CooperativeLaunch => "cooperative launch",
        }
    }

    /// The capabilities that have it, in words.
    #[must_use]
    pub const fn needs(self) -> &'static str {
        match self {
            Self::CpAsync | Self::Ldmatrix | Self::MmaBf16 | Self::MmaInt8 | Self::CooperativeLaunch => {
                "compute capability 8.0 or newer"
            }
            Self::MmaFp8 => "compute capability 8.9 or newer",
            Self::MmaFp8Native => "compute capability 8.9 or 12.x",
            Self::BulkCopy | Self::DependentLaunch | Self::Clusters => "compute capability 9.0 or newer",
            Self::Wgmma => "compute capability 9.0",
            Self::MmaFp4 => "compute capability 12.0 or 12.1",
        }
    }

    const fn bit(self) -> u32 {
        1 << self as u32
    }

    fn on(self, c: Capability) -> bool {
        let at_least = |major, minor| c >= Capability::new(major, minor);
        match self {
            Self::CpAsync | Self::Ldmatrix | Self::MmaBf16 | Self::MmaInt8 | Self::CooperativeLaunch => at_least(8, 0),
            Self::MmaFp8 => at_least(8, 9),
            Self::MmaFp8Native => c == Capability::new(8, 9) || c.major == 12,
            Self::BulkCopy | Self::DependentLaunch | Self::Clusters => at_least(9, 0),
            Self::Wgmma => Target::Sm90a.runs_on(c),
            Self::MmaFp4 => Target::Sm120f.runs_on(c),
        }
    }
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A set of features.
///
/// ```
/// use ninfer_core::capability::{Capability, Feature, Features};
/// let h200 = Features::of(Capability::new(9, 0));
/// assert!(h200.has(Feature::Wgmma) && !h200.has(Feature::MmaFp4));
/// ```
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Features(u32);

impl Features {
    /// No feature: the CPU, and parts below 8.0.
    pub const NONE: Self = Self(0);

    /// What a capability implies. An unknown newer part gets what every newer part has, and nothing that belongs to one
    /// architecture.
    #[must_use]
    pub fn of(capability: Capability) -> Self {
        Self(Feature::ALL.iter().filter(|f| f.on(capability)).fold(0, |bits, f| bits | f.bit()))
    }

    /// Whether the set has a feature.
    #[must_use]
    pub const fn has(self, feature: Feature) -> bool {
        self.0 & feature.bit() != 0
    }

    /// The set without a feature: what a driver query denied, or a test wants to see missing.
    #[must_use]
    pub const fn without(self, feature: Feature) -> Self {
        Self(self.0 & !feature.bit())
    }

    /// The features in the set.
    pub fn iter(self) -> impl Iterator<Item = Feature> {
        Feature::ALL.into_iter().filter(move |&f| self.has(f))
    }

    /// Fails where a feature is missing, naming the way around it.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn require(self, feature: Feature, capability: Capability) -> Result<()> {
        if self.has(feature) {
            return Ok(());
        }
        let detour = match feature {
            Feature::MmaFp4 if self.has(Feature::MmaFp8) => "; use the NVFP4→FP8 bridge",
            Feature::MmaFp4 => "; dequantise NVFP4 to BF16",
            Feature::MmaFp8 | Feature::MmaFp8Native => "; multiply in BF16",
            Feature::Wgmma => "; use mma.sync",
            _ => "",
        };
        Err(Error::Unsupported {
            op: feature.name().to_owned(),
            need: feature.needs().to_owned(),
            have: format!("{capability}{detour}"),
        })
    }
}

impl fmt::Debug for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

/// Names in a fixed order, separated by commas.
impl fmt::Display for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, feature) in self.iter().enumerate() {
            if i > 0 {
                f.write_str(", ")?;
            }
            f.write_str(feature.name())?;
        }
        Ok(())
    }
}

/// How NVFP4 weights are multiplied where many rows share them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Nvfp4Route {
    /// Block-scaled FP4 MMA on the stored codes.
    BlockScaled,
    /// Converted to FP8 once, at load, and multiplied on FP8 tensor cores.
    BridgeFp8,
    /// Dequantised to BF16 on the way.
    Bf16,
}

/// The best NVFP4 route for a capability under a driver (`None`: a driver new enough for everything).
///
/// ```
/// use ninfer_core::capability::{Capability, Nvfp4Route, nvfp4_route};
/// assert_eq!(nvfp4_route(Capability::new(12, 1), None), Nvfp4Route::BlockScaled);
/// assert_eq!(nvfp4_route(Capability::new(9, 0), None), Nvfp4Route::BridgeFp8);
/// assert_eq!(nvfp4_route(Capability::new(8, 6), None), Nvfp4Route::Bf16);
/// ```
#[must_use]
pub fn nvfp4_route(capability: Capability, driver: Option<CudaVersion>) -> Nvfp4Route {
    let loads = |t: Target| driver.is_none_or(|d| d.newest_ptx() >= t.ptx());
    let has = |f| Features::of(capability).has(f);
    if has(Feature::MmaFp4) && loads(Target::Sm120f) {
        Nvfp4Route::BlockScaled
    } else if has(Feature::MmaFp8) && loads(Target::Sm89) {
        Nvfp4Route::BridgeFp8
    } else {
        Nvfp4Route::Bf16
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn missing(major: u8, minor: u8) -> Vec<Feature> {
        let set = Features::of(Capability::new(major, minor));
        Feature::ALL.into_iter().filter(|&f| !set.has(f)).collect()
    }

    #[test]
    fn features_by_capability() {
        use Feature::{BulkCopy, Clusters, DependentLaunch, MmaFp4, MmaFp8, MmaFp8Native, Wgmma};
        let ampere = [MmaFp8, MmaFp8Native, BulkCopy, DependentLaunch, Clusters, Wgmma, MmaFp4];
        assert_eq!(missing(8, 0), ampere);
        assert_eq!(missing(8, 6), ampere);
        assert_eq!(missing(8, 9), [BulkCopy, DependentLaunch, Clusters, Wgmma, MmaFp4]);
        assert_eq!(missing(9, 0), [MmaFp8Native, MmaFp4]);
        assert_eq!(missing(10, 0), [MmaFp8Native, Wgmma, MmaFp4]);
        assert_eq!(missing(12, 0), [Wgmma]);
        assert_eq!(missing(12, 1), [Wgmma]);
        assert_eq!(missing(12, 2), [Wgmma, MmaFp4]);
        assert_eq!(missing(13, 0), [MmaFp8Native, Wgmma, MmaFp4]);
        assert_eq!(Features::of(Capability::new(7, 5)), Features::NONE);
    }

    #[test]
    fn fp4_on_a_part_without_it_names_the_bridge() {
        let refuse = |major, minor| {
            let c = Capability::new(major, minor);
            Features::of(c).require(Feature::MmaFp4, c).unwrap_err()
        };
        let Error::Unsupported { op, need, have } = refuse(9, 0) else { panic!() };
        assert_eq!(op, "block-scaled fp4 mma");
        assert!(need.contains("12.0 or 12.1") && have.contains("9.0") && have.contains("FP8 bridge"), "{need} {have}");
        assert!(refuse(8, 0).to_string().contains("BF16"));
        let c = Capability::new(12, 1);
        assert_eq!(Features::of(c).require(Feature::MmaFp4, c), Ok(()));
    }

    #[test]
    fn old_driver_takes_fp4_away() {
        let rtx50 = Capability::new(12, 0);
        assert_eq!(nvfp4_route(rtx50, Some(CudaVersion::new(12, 8))), Nvfp4Route::BridgeFp8);
        assert_eq!(nvfp4_route(rtx50, Some(CudaVersion::new(12, 9))), Nvfp4Route::BlockScaled);
        assert_eq!(nvfp4_route(Capability::new(8, 9), Some(CudaVersion::new(12, 0))), Nvfp4Route::Bf16);
    }

    #[test]
    fn sets_print_their_names() {
        let set = Features::of(Capability::new(8, 0)).without(Feature::CooperativeLaunch);
        assert_eq!(set.to_string(), "cp.async, ldmatrix, bf16 mma, int8 mma");
        assert_eq!(Features::NONE.to_string(), "");
    }
}
