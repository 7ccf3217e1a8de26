"""Words from which the demo model's own training data is made."""

ANIMALS = (
    "ants bats bears bees butterflies camels cats chickens cows crabs crows deer dogs dolphins donkeys "
    "ducks eagles elephants fish foxes frogs geese giraffes goats hamsters horses kangaroos koalas lions "
    "lizards mice monkeys octopuses otters owls pandas parrots penguins pigeons pigs rabbits rats seals "
    "sharks sheep snails snakes spiders squirrels swans tigers turtles whales wolves zebras"
).split()
FOODS = (
    "apples avocados bananas beans bread broccoli butter cake candy carrots cheese cherries chicken chocolate "
    "coffee cookies corn eggs garlic grapes honey jam juice lemons lettuce mangoes milk mushrooms noodles "
    "nuts onions oranges pancakes pasta peaches pears peppers pizza popcorn potatoes rice salad salt soup "
    "spinach strawberries sugar sushi tea tofu tomatoes water yogurt"
).split()
THINGS = (
    "airplanes backpacks balloons batteries bicycles boats books bottles bridges buses cameras candles cars "
    "chairs clocks coins computers cups dolls doors drums elevators engines flags forks gardens gloves "
    "guitars hammers hats helicopters houses keys kites knives ladders lamps letters magnets maps mirrors "
    "money newspapers paintings paper pencils phones pianos pillows planes puzzles radios robots rockets "
    "scissors ships shoes soap socks stamps tables telescopes tents toys trains trucks umbrellas violins "
    "watches wheels windows"
).split()
NATURE = (
    "beaches caves clouds comets deserts earthquakes fire flowers fog forests glaciers gold grass ice islands "
    "lakes leaves light lightning mountains oceans planets plants rain rainbows rivers rocks sand seeds "
    "shadows snow space stars storms sunlight thunder tides trees volcanoes waterfalls waves wind"
).split()
IDEAS = (
    "ambition art change courage creativity curiosity democracy dreams education energy exercise failure "
    "fairness family fashion freedom friendship games gravity happiness health history holidays homework "
    "honesty hope humor hygiene jobs justice kindness language laughter leadership luck math memory "
    "mistakes music nature patience peace poetry politeness recycling respect school science silence "
    "sleep sports stress teamwork technology time traffic travel trust weather work"
).split()
PLACES = (
    "a bakery, a beach, a big city, a bookshop, a bus, a castle, a cave, a desert, a farm, a forest, a garden, "
    "a hospital, a hotel, a kitchen, a library, a market, a museum, a park, a ship, a small town, a space "
    "station, a train, a zoo, an airport, an island, an old house, school, the moon, the mountains, the sea"
).split(", ")
JOBS = (
    (
        "actor artist astronaut baker builder carpenter chef clown dentist detective doctor driver farmer "
        "firefighter fisherman gardener inventor judge king knight librarian magician mechanic musician nurse "
        "painter photographer pilot pirate plumber poet police officer princess programmer queen sailor scientist "
        "singer student tailor teacher waiter witch wizard writer"
    )
    .replace("police officer", "police-officer")
    .split()
)
TRAITS = (
    "angry brave busy careful clever clumsy curious fearless forgetful friendly funny gentle greedy happy "
    "hungry kind lazy lonely lucky nervous noisy old patient polite proud quiet sad shy silly sleepy "
    "strange tired tiny wise young"
).split()
NAMES = (
    "Ada Alex Amir Anna Ben Bella Carlos Chloe Clara Daniel David Dina Ella Emma Eric Eva Felix Finn Grace "
    "Hana Hugo Ida Ivan Jack Jane Jin John Julia Kai Karim Kate Lea Leo Lily Lina Lucas Lucy Maria Marta "
    "Max Maya Mia Milo Mina Nina Noah Nora Oliver Omar Oscar Pablo Paul Petra Priya Ravi Rosa Ruth Sam Sara "
    "Sofia Stefan Tariq Theo Tim Tom Vera Victor Wei Yara Yusuf Zoe"
).split()
TASKS = (
    "apologize to a friend; ask for a day off; bake a cake; boil an egg; build a birdhouse; calm down; change "
    "a light bulb; choose a good book; choose a gift; clean a window; clean my room; cook rice; draw a cat; "
    "fall asleep faster; feed a cat; fix a flat tire; get better at math; grow tomatoes; introduce myself; "
    "keep a plant alive; learn a new language; learn to cook; learn to draw; learn to swim; learn to "
    "type faster; make a budget; make a cup of tea; make a paper airplane; make a salad; make a sandwich; "
    "make coffee; make new friends; make pancakes; organize my desk; pack a suitcase; paint a wall; plan "
    "a birthday party; plan a picnic; plant a tree; play chess; prepare for a job interview; prepare for a "
    "test; read more books; remember names; ride a bike; save money; save water; say no politely; spend less "
    "time on my phone; start a garden; start running; stay healthy; stay warm in winter; stop being late; "
    "study for an exam; take a good photo; take care of a dog; tell a good story; tie a tie; train a puppy; "
    "wake up early; wash a car; wash my hands; welcome a guest; write a letter; write a poem; write a "
    "thank you note; write an email"
).split("; ")
FEELINGS = (
    "angry, because my friend forgot my birthday; bored today; happy, because I got a new job; lonely; "
    "nervous about my exam; nervous about my first day at school; sad today; so tired; stressed at work; "
    "worried about my cat; excited about my vacation; afraid of the dark; proud of my sister; "
    "confused about my homework; homesick; sick"
).split("; ")
SENTENCES = (
    "The cat sleeps on the chair; She walks to school every day; We eat dinner at seven; The boy "
    "kicks the ball; It rains a lot in spring; My brother likes old cars; They play music in the park; "
    "I forgot my keys at home; The train is late again; He reads a book about stars; The children laugh "
    "at the clown; Our dog barks at night; The teacher writes on the board; The soup is too hot; "
    "I want to visit my grandmother; The garden is full of flowers; The movie was very long; You sing well; "
    "The baker makes fresh bread; The ship sails to the island"
).split("; ")
