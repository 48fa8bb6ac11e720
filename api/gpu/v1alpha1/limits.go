package v1alpha1

import (
	"fmt"
	"regexp"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// The numbers that the markers on the types repeat.
const (
	maxMPSClients     = 48 // per device, from Volta to Hopper
	maxReplicas       = 64
	defaultMaxClients = 16
	profilePattern    = `^[1-9][0-9]?g\.[1-9][0-9]*gb([+-][a-z]+(\.[a-z]+)*)*$`
)

func defaultMemoryStep() resource.Quantity { return resource.MustParse("1Gi") }

// several checks a number of parts: one part is no cut.
func several(n, most int32, path *field.Path) field.ErrorList {
	if n < 2 || n > most {
		return field.ErrorList{field.Invalid(path, n, fmt.Sprintf("must be 2 to %d", most))}
	}
	return nil
}

func profiles(names []string, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	pattern := regexp.MustCompile(profilePattern)
	for i, name := range names {
		if !pattern.MatchString(name) {
			errs = append(errs, field.Invalid(path.Index(i), name, "must be a MIG profile such as 1g.10gb or 1g.10gb+me, as nvidia-smi mig -lgip lists them"))
		}
	}
	return errs
}
