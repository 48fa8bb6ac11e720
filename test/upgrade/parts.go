package upgrade

import (
	"fmt"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"
)

// part is a part of a release that an admin can upgrade on its own.
type part string

// The parts of a release. The controller and the plugin have their rights, policies and
// classes with them; the chart is all objects that belong to none of the others.
const (
	crds       part = "CRDs"
	controller part = "controller"
	plugin     part = "plugin"
	supervisor part = "supervisor"
	chart      part = "chart"
)

// parts are all, in the order in which Helm upgrades them.
func parts() []part { return []part{crds, chart, supervisor, plugin, controller} }

// orders have each part first once and last once.
func orders() [][]part {
	var all [][]part
	for i := range parts() {
		all = append(all, slices.Concat(parts()[i:], parts()[:i]))
	}
	return all
}

// partOf returns the part that a template of the chart belongs to.
func partOf(template string) part {
	for directory, p := range map[string]part{
		"crd": crds, "controller": controller, "deviceclass": controller, "node": plugin, "mps": supervisor,
	} {
		if strings.Contains(template, "/templates/"+directory+"/") {
			return p
		}
	}
	return chart
}

// object is an object of a release.
type object struct {
	id   string // resource, namespace and name, as kubectl takes them
	text string
}

// split returns the objects of a release's manifest, as Helm prints it, by parts.
func split(manifest string) (map[part][]object, error) {
	all := map[part][]object{}
	for document := range strings.SplitSeq(manifest, "\n---\n") {
		_, template, found := strings.Cut(document, "# Source: ")
		if !found {
			continue
		}
		template, _, _ = strings.Cut(template, "\n")
		var head struct {
			APIVersion, Kind string
			Metadata         struct{ Name, Namespace string }
		}
		if err := yaml.Unmarshal([]byte(document), &head); err != nil {
			return nil, fmt.Errorf("read an object of %s: %w", template, err)
		}
		if head.Kind == "" {
			continue // a template that has only comments
		}
		group, version, ok := strings.Cut(head.APIVersion, "/")
		resource := strings.ToLower(head.Kind)
		if ok {
			resource += "." + version + "." + group
		}
		id := resource + "/" + head.Metadata.Name
		all[partOf(template)] = append(all[partOf(template)], object{id, document})
	}
	return all, nil
}

// removed returns the ids of those objects that next doesn't have.
func removed(before, next []object) []string {
	var ids []string
	for _, o := range before {
		if !slices.ContainsFunc(next, func(n object) bool { return n.id == o.id }) {
			ids = append(ids, o.id)
		}
	}
	return ids
}
