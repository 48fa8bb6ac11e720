package v1alpha1

import (
	"slices"

	metav1validation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// SetDefaults fills in what the server fills in for objects that it stores.
func (s *SharingPolicySpec) SetDefaults() {
	if t := s.Plan.TimeSliced; t != nil && t.Interval == "" {
		t.Interval = DefaultTimeSlice
	}
	if s.Plan.MPS == nil || s.Plan.MPS.Consumable == nil {
		return
	}
	c := s.Plan.MPS.Consumable
	if c.MemoryStep == nil {
		step := defaultMemoryStep()
		c.MemoryStep = &step
	}
	if c.MaxClients == nil {
		c.MaxClients = new(int32)
		*c.MaxClients = defaultMaxClients
	}
}

// Validate returns the errors in the form of a policy, by field. The
// server checks most of it when it stores the object; this checks it all, for
// objects that never met a server. Whether gpuSelector compiles is checked
// where it is compiled, by the controller.
func (s *SharingPolicySpec) Validate() field.ErrorList {
	spec := field.NewPath("spec")
	var errs field.ErrorList
	if s.NodeSelector != nil {
		errs = append(errs, metav1validation.ValidateLabelSelector(s.NodeSelector,
			metav1validation.LabelSelectorValidationOptions{}, spec.Child("nodeSelector"))...)
	}
	return append(errs, s.Plan.validate(spec.Child("plan"))...)
}

func (p *Plan) validate(path *field.Path) field.ErrorList {
	var errs field.ErrorList
	set := 0
	if p.Exclusive != nil {
		set++
	}
	if p.Partitioned != nil {
		set++
		errs = append(errs, p.Partitioned.validate(path.Child("partitioned"))...)
	}
	if p.MPS != nil {
		set++
		errs = append(errs, p.MPS.validate(path.Child("mps"))...)
	}
	if p.TimeSliced != nil {
		set++
		errs = append(errs, p.TimeSliced.validate(path.Child("timeSliced"))...)
	}
	switch {
	case set == 0:
		errs = append(errs, field.Required(path, "set one of exclusive, partitioned, mps, timeSliced"))
	case set > 1:
		errs = append(errs, field.Forbidden(path, "set only one of exclusive, partitioned, mps, timeSliced"))
	}
	return errs
}

func (p *PartitionedPlan) validate(path *field.Path) field.ErrorList {
	var errs field.ErrorList
	if len(p.Profiles) > 0 && len(p.Layout) > 0 {
		errs = append(errs, field.Forbidden(path.Child("layout"), "profiles (cut on demand) and layout (a fixed partitioning) exclude each other"))
	}
	errs = append(errs, profiles(p.Profiles, path.Child("profiles"))...)
	for i, name := range p.Profiles {
		if slices.Contains(p.Profiles[:i], name) {
			errs = append(errs, field.Duplicate(path.Child("profiles").Index(i), name))
		}
	}
	errs = append(errs, profiles(p.Layout, path.Child("layout"))...)
	if p.KeepWarm != nil && p.KeepWarm.Duration < 0 {
		errs = append(errs, field.Invalid(path.Child("keepWarm"), p.KeepWarm.Duration.String(), "must not be negative"))
	}
	if p.MPS != nil {
		errs = append(errs, several(p.MPS.Shares, maxMPSClients, path.Child("mps", "shares"))...)
	}
	return errs
}

func (p *MPSPlan) validate(path *field.Path) field.ErrorList {
	switch {
	case (p.Shares == nil) == (p.Consumable == nil):
		return field.ErrorList{field.Required(path, "set exactly one of shares, consumable")}
	case p.Shares != nil:
		return several(*p.Shares, maxMPSClients, path.Child("shares"))
	}
	var errs field.ErrorList
	path = path.Child("consumable")
	if s := p.Consumable.MemoryStep; s != nil && s.Sign() <= 0 {
		errs = append(errs, field.Invalid(path.Child("memoryStep"), s.String(), "must be positive"))
	}
	if c := p.Consumable.MaxClients; c != nil {
		errs = append(errs, several(*c, maxMPSClients, path.Child("maxClients"))...)
	}
	return errs
}

func (p *TimeSlicedPlan) validate(path *field.Path) field.ErrorList {
	errs := several(p.Replicas, maxReplicas, path.Child("replicas"))
	switch p.Interval {
	case "", DefaultTimeSlice, ShortTimeSlice, MediumTimeSlice, LongTimeSlice:
		return errs
	}
	return append(errs, field.NotSupported(path.Child("interval"), p.Interval,
		[]TimeSliceInterval{DefaultTimeSlice, ShortTimeSlice, MediumTimeSlice, LongTimeSlice}))
}
