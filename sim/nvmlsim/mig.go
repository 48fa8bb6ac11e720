package nvmlsim

// ProfileEnums is how many GPU instance profile enums NVML has
// (NVML_GPU_INSTANCE_PROFILE_COUNT of driver 580; its H200 answers
// InvalidArgument from 17 on).
const ProfileEnums = 17

// MIGMode returns the current and the pending mode; NotSupported without MIG.
func (g *GPU) MIGMode() (current, pending bool, err error) {
	if err := g.needMIG("DeviceGetMigMode"); err != nil {
		return false, false, err
	}
	s := g.state()
	return s.MIGCurrent, s.MIGPending, nil
}

// MaxMIGDeviceCount returns the maximum, 0 while the mode is off or if the
// product has no MIG.
func (g *GPU) MaxMIGDeviceCount() (int, error) {
	n := 0
	if g.model.MIG != nil && g.state().MIGCurrent {
		n = int(g.model.MIG.MaxDevices)
	}
	return value(g, "DeviceGetMaxMigDeviceCount", n)
}

// ProfileByEnum is nvmlDeviceGetGpuInstanceProfileInfo: it works with the mode
// off too. It returns NotSupported for an enum that the product lacks,
// InvalidArgument for an unknown enum.
func (g *GPU) ProfileByEnum(enum uint32) (Profile, error) {
	return g.profileByEnum("DeviceGetGpuInstanceProfileInfo", enum)
}

// ProfileByEnumV is nvmlDeviceGetGpuInstanceProfileInfoV, which also returns
// the name.
func (g *GPU) ProfileByEnumV(enum uint32) (Profile, error) {
	return g.profileByEnum("DeviceGetGpuInstanceProfileInfoV", enum)
}

func (g *GPU) profileByEnum(call string, enum uint32) (Profile, error) {
	if err := g.call(call); err != nil {
		return Profile{}, err
	}
	if enum >= ProfileEnums {
		return Profile{}, InvalidArgument
	}
	return g.profile(NotSupported, func(p Profile) bool { return p.Enum == enum })
}

// ProfileByID finds a profile by the id it reports.
func (g *GPU) ProfileByID(id uint32) (Profile, error) {
	if err := g.call("DeviceGetGpuInstanceProfileInfoByIdV"); err != nil {
		return Profile{}, err
	}
	return g.profile(InvalidArgument, func(p Profile) bool { return p.ID == id })
}

func (g *GPU) profile(missing Return, is func(Profile) bool) (Profile, error) {
	if g.model.MIG == nil {
		return Profile{}, NotSupported
	}
	for _, p := range g.model.MIG.Profiles {
		if is(p) {
			return p, nil
		}
	}
	return Profile{}, missing
}

// needMIG is like call, for functions that only products with MIG support.
func (g *GPU) needMIG(call string) error {
	if err := g.call(call); err != nil {
		return err
	}
	if g.model.MIG == nil {
		return NotSupported
	}
	return nil
}

// needMIGMode is like call, for functions that work only while the mode is on.
func (g *GPU) needMIGMode(call string) error {
	if err := g.needMIG(call); err != nil {
		return err
	}
	if !g.state().MIGCurrent {
		return NotSupported
	}
	return nil
}

// PossiblePlacements returns the placements of a profile (by id) on an empty
// GPU: starts and one size.
func (g *GPU) PossiblePlacements(profileID uint32) (starts []uint32, size uint32, err error) {
	if err := g.needMIG("DeviceGetGpuInstancePossiblePlacements"); err != nil {
		return nil, 0, err
	}
	p, err := g.profile(InvalidArgument, func(p Profile) bool { return p.ID == profileID })
	return p.Starts, p.Size, err
}
