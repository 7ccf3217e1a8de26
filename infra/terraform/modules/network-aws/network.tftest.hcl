provider "aws" {
  region = "eu-central-1"
}

override_data {
  target = data.aws_availability_zones.this
  values = { names = ["eu-central-1a", "eu-central-1b", "eu-central-1c"] }
}

variables {
  name = "aws-eu"
  cidr = "10.20.0.0/20"
  tags = { project = "mico" }
}

run "private" {
  variables { public = false }
  assert {
    condition = { for key, subnet in aws_subnet.this : key => [subnet.cidr_block, subnet.availability_zone, subnet.tags["Name"]] } == {
      private-a = ["10.20.0.0/22", "eu-central-1a", "aws-eu-private-a"]
      private-b = ["10.20.4.0/22", "eu-central-1b", "aws-eu-private-b"]
      public-a  = ["10.20.8.0/22", "eu-central-1a", "aws-eu-public-a"]
    }
    error_message = "machines in two zones, and a public subnet for the NAT gateway alone"
  }
  assert {
    condition     = toset(output.network.subnets) == toset([aws_subnet.this["private-a"].id, aws_subnet.this["private-b"].id])
    error_message = "machines go into the private subnets"
  }
  assert {
    condition     = alltrue([for subnet in aws_subnet.this : !subnet.map_public_ip_on_launch && subnet.vpc_id == aws_vpc.this.id])
    error_message = "no machine has a public address"
  }
  assert {
    condition = alltrue([
      aws_route.out["private"].nat_gateway_id == aws_nat_gateway.this[0].id,
      aws_route.out["public"].gateway_id == aws_internet_gateway.this.id,
      alltrue([for key, route in aws_route.out : route.destination_cidr_block == "0.0.0.0/0" && route.route_table_id == aws_route_table.this[key].id]),
      aws_nat_gateway.this[0].allocation_id == aws_eip.nat[0].id,
      aws_nat_gateway.this[0].subnet_id == aws_subnet.this["public-a"].id,
      aws_eip.nat[0].domain == "vpc",
      aws_internet_gateway.this.vpc_id == aws_vpc.this.id,
      alltrue([for table in aws_route_table.this : table.vpc_id == aws_vpc.this.id]),
      toset(output.network.routes) == toset([for table in aws_route_table.this : table.id]),
    ])
    error_message = "private subnets lead out by the NAT gateway, which leads out by the internet gateway"
  }
  assert {
    condition = alltrue([
      aws_default_security_group.this.vpc_id == aws_vpc.this.id, aws_default_security_group.this.tags["Name"] == "aws-eu-unused",
    ])
    error_message = "a machine that is given no group can neither be reached nor reach out"
  }
  assert {
    condition = { for key, link in aws_route_table_association.this : key => [link.subnet_id, link.route_table_id] } == {
      private-a = [aws_subnet.this["private-a"].id, aws_route_table.this["private"].id]
      private-b = [aws_subnet.this["private-b"].id, aws_route_table.this["private"].id]
      public-a  = [aws_subnet.this["public-a"].id, aws_route_table.this["public"].id]
    }
    error_message = "each subnet has its route table"
  }
  assert {
    condition = alltrue([
      aws_vpc.this.cidr_block == "10.20.0.0/20", aws_vpc.this.enable_dns_hostnames,
      alltrue([for each in [aws_vpc.this, aws_internet_gateway.this, aws_eip.nat[0], aws_nat_gateway.this[0]] : each.tags == tomap({ Name = "aws-eu", project = "mico" })]),
      alltrue([for key, table in aws_route_table.this : table.tags["Name"] == "aws-eu-${key}"]),
    ])
    error_message = "the network's range and everybody's name"
  }
}

run "public" {
  variables { public = true }
  assert {
    condition     = sort(keys(aws_subnet.this)) == tolist(["public-a", "public-b"]) && alltrue([for subnet in aws_subnet.this : subnet.map_public_ip_on_launch])
    error_message = "machines have addresses, in two zones"
  }
  assert {
    condition     = length(aws_nat_gateway.this) == 0 && length(aws_eip.nat) == 0 && keys(aws_route.out) == ["public"]
    error_message = "no NAT gateway is paid for"
  }
}
