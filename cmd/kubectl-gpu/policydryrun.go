package main

import (
	"context"
	"fmt"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
)

// showForecast prints a forecast.
func showForecast(ctx context.Context, o *options, file string) error {
	p, err := readPolicy(file, o.In)
	if err != nil {
		return err
	}
	r, err := o.reader(policyParts())
	if err != nil {
		return err
	}
	in, before, err := readFacts(ctx, r, o.currentNamespace())
	if err != nil {
		return err
	}
	after, err := withPolicy(ctx, r, file, p, before)
	if err != nil {
		return err
	}
	if in.server, err = readAbilities(ctx, r); err != nil {
		return err
	}
	defer r.printNotes(o.ErrOut)
	if in.before, err = rules(ctx, before, ""); err != nil {
		return err
	}
	if in.after, err = rules(ctx, after, p.Name); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	f := in.predict(p.Name)
	f.Plan = planText(p.Spec.Plan)
	if o.output != "" {
		return write(o.Out, o.output, f)
	}
	oneLines(&f)
	f.print(o.Out)
	return nil
}

// readFacts reads the facts that a forecast follows from, and the policies. It fails if the user may
// not read it all: an answer without would be wrong.
func readFacts(ctx context.Context, r *reader, namespace string) (in planFacts, policies []v1alpha1.SharingPolicy, err error) {
	if in.nodes, err = r.nodes(ctx); err != nil {
		return in, nil, err
	}
	if in.inventories, err = r.inventories(ctx); err != nil {
		return in, nil, err
	}
	if policies, err = r.policies(ctx); err != nil {
		return in, nil, err
	}
	if in.claims, _, err = r.claims(ctx, namespace); err != nil {
		return in, nil, err
	}
	return in, policies, r.requireRead("what the policy would do", nodesName, inventoriesName, policiesName, claimsName)
}
