package v1beta1

import (
	"maps"
	"regexp"
	"slices"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

func (*GpuConfig) isConfig()        {}
func (*MigDeviceConfig) isConfig()  {}
func (*VfioDeviceConfig) isConfig() {}

// Validate returns the errors in the configuration, by field.
func (c *GpuConfig) Validate() field.ErrorList {
	s, path := c.Sharing, field.NewPath("sharing")
	if s == nil {
		return nil
	}
	errs := strategy(s.Strategy, path)
	if s.TimeSlicingConfig != nil {
		errs = append(errs, goesWith(s.Strategy, TimeSlicingStrategy, path.Child("timeSlicingConfig"))...)
		errs = append(errs, s.TimeSlicingConfig.validate(path.Child("timeSlicingConfig"))...)
	}
	if s.MpsConfig != nil {
		errs = append(errs, goesWith(s.Strategy, MPSStrategy, path.Child("mpsConfig"))...)
		errs = append(errs, s.MpsConfig.validate(path.Child("mpsConfig"))...)
	}
	return errs
}

// Validate returns the errors in the configuration, by field.
func (c *MigDeviceConfig) Validate() field.ErrorList {
	s, path := c.Sharing, field.NewPath("sharing")
	if s == nil {
		return nil
	}
	errs := strategy(s.Strategy, path)
	if s.MpsConfig != nil && s.Strategy == MPSStrategy {
		errs = append(errs, s.MpsConfig.validate(path.Child("mpsConfig"))...)
	}
	return errs
}

// Validate returns nil: this driver has no device that the configuration is for.
func (*VfioDeviceConfig) Validate() field.ErrorList { return nil }

func strategy(got SharingStrategy, sharing *field.Path) field.ErrorList {
	path, known := sharing.Child("strategy"), []SharingStrategy{TimeSlicingStrategy, MPSStrategy}
	switch {
	case got == "":
		return field.ErrorList{field.Required(path, "say how to share, or leave out sharing")}
	case !slices.Contains(known, got):
		return field.ErrorList{field.NotSupported(path, got, known)}
	}
	return nil
}

func goesWith(got, want SharingStrategy, path *field.Path) field.ErrorList {
	if got == want {
		return nil
	}
	return field.ErrorList{field.Forbidden(path, "goes with strategy "+string(want)+" only")}
}

func (c *TimeSlicingConfig) validate(path *field.Path) field.ErrorList {
	known := []TimeSliceInterval{DefaultTimeSlice, ShortTimeSlice, MediumTimeSlice, LongTimeSlice}
	switch path = path.Child("interval"); {
	case c.Interval == nil:
		return field.ErrorList{field.Required(path, "say how long, or leave out timeSlicingConfig")}
	case !slices.Contains(known, *c.Interval):
		return field.ErrorList{field.NotSupported(path, *c.Interval, known)}
	}
	return nil
}

func (c *MpsConfig) validate(path *field.Path) field.ErrorList {
	var errs field.ErrorList
	if p := c.DefaultActiveThreadPercentage; p != nil && (*p < 0 || *p > 100) {
		errs = append(errs, field.Invalid(path.Child("defaultActiveThreadPercentage"), *p, "must be 0 to 100"))
	}
	if q := c.DefaultPinnedDeviceMemoryLimit; q != nil {
		errs = append(errs, memoryLimit(*q, path.Child("defaultPinnedDeviceMemoryLimit"))...)
	}
	path = path.Child("defaultPerDevicePinnedMemoryLimit")
	for _, key := range slices.Sorted(maps.Keys(c.DefaultPerDevicePinnedMemoryLimit)) {
		if !namesDevice(key) {
			errs = append(errs, field.Invalid(path.Key(key), key, "must be a GPU's or MIG device's UUID, or its index in the claim"))
		}
		errs = append(errs, memoryLimit(c.DefaultPerDevicePinnedMemoryLimit[key], path.Key(key))...)
	}
	return errs
}

func namesDevice(key string) bool {
	const hex = `[0-9a-fA-F]`
	ok, err := regexp.MatchString(`^((GPU|MIG)-`+hex+`{8}(-`+hex+`{4}){3}-`+hex+`{12}|0|[1-9][0-9]{0,3})$`, key)
	return ok && err == nil
}

// mebibyte is the unit of the MPS daemon's limits.
const mebibyte = 1 << 20

func memoryLimit(q resource.Quantity, path *field.Path) field.ErrorList {
	if q.Value() < mebibyte {
		return field.ErrorList{field.Invalid(path, q.String(), "must be at least 1Mi")}
	}
	return nil
}
