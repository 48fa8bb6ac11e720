package policy

import (
	"context"
	"fmt"
	"time"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/kubectl/cluster"
	"github.com/tessera-dra/tessera/pkg/kubectl/forecast"
	"github.com/tessera-dra/tessera/pkg/kubectl/terminal"
)

// showForecast prints a forecast.
func showForecast(ctx context.Context, o *cluster.Options, file string) error {
	p, err := forecast.Read(file, o.In)
	if err != nil {
		return err
	}
	r, err := o.Reader(policyParts())
	if err != nil {
		return err
	}
	in, before, err := readFacts(ctx, r, o.CurrentNamespace())
	if err != nil {
		return err
	}
	after, err := forecast.With(ctx, r, file, p, before)
	if err != nil {
		return err
	}
	if in.server, err = forecast.Abilities(ctx, r); err != nil {
		return err
	}
	defer r.PrintNotes(o.ErrOut)
	if in.before, err = forecast.Rules(ctx, before, ""); err != nil {
		return err
	}
	if in.after, err = forecast.Rules(ctx, after, p.Name); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	in.now = time.Now()
	f := in.predict(p.Name)
	f.Plan = forecast.Text(p.Spec.Plan)
	if o.Output != "" {
		return terminal.Write(o.Out, o.Output, f)
	}
	terminal.OneLines(&f)
	f.print(o.Out)
	return nil
}

// readFacts reads the facts that a forecast follows from, and the policies. It fails if the user may
// not read it all: an answer without would be wrong.
func readFacts(ctx context.Context, r *cluster.Reader, namespace string) (in planFacts, policies []v1alpha1.SharingPolicy, err error) {
	if in.nodes, err = r.Nodes(ctx); err != nil {
		return in, nil, err
	}
	if in.inventories, err = r.Inventories(ctx); err != nil {
		return in, nil, err
	}
	if policies, err = r.Policies(ctx); err != nil {
		return in, nil, err
	}
	if in.claims, _, err = r.Claims(ctx, namespace); err != nil {
		return in, nil, err
	}
	return in, policies, r.RequireRead("what the policy would do", cluster.NodesName, cluster.InventoriesName, cluster.PoliciesName, cluster.ClaimsName)
}
